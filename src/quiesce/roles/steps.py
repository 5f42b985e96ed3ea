"""Engine steps: who takes part, which pages they may write, what came of it.

Our own step is a borrower like any other: while it runs, the pages it writes are lent to it, so a request that is
ended in the middle of a step gives nothing back before the step is over (guard D2). Whoever sits (`running.py`) has
been lent all the while; everyone else is lent for each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from quiesce.core.admission import pages_for
from quiesce.core.ledger import Ledger
from quiesce.engine.engine import Result
from quiesce.engine.grammar import TooComplexError
from quiesce.roles.engine_thread import EngineThread
from quiesce.roles.running import Running
from quiesce.roles.sequence import Batch, Sequence

log = logging.getLogger("quiesce.steps")

AHEAD = 16  # pages that an answer takes at a time, at most: to take one costs as much as to take all of them


@dataclass(frozen=True)
class Listeners:
    """Called in the role's thread after a step, for each member that has not ended meanwhile."""

    computed: Callable[[Sequence, Result], None]
    failed: Callable[[Sequence, Exception], None]
    retract: Callable[[Sequence], None]  # gives its pages back, to be computed again later


class Steps:
    def __init__(self, thread: EngineThread, batch: Batch, ledger: Ledger, page_size: int, tell: Listeners) -> None:
        self.thread = thread
        self.batch = batch
        self.ledger = ledger
        self.page_size = page_size
        self.tell = tell
        self.running: Running | None = None  # where answers are computed
        self.prompt_tokens_computed = 0  # whether or not their request still wanted them
        self.probing = 0  # steps that were for probes alone

    def run_in(self, running: Running) -> None:
        self.running, self.batch.left = running, running.leave

    def launch(self) -> bool:
        """Starts the next step unless one is under way or there is nothing to compute."""
        if self.thread.busy:
            return False
        running = self.running
        if running is not None:
            self._seat(running)
        candidates = self.batch.plan()
        short = [] if running is None else [(sequence, 1) for sequence in running.short()]
        room = self.page_size
        if short or any(s.computed + count > room * len(s.pages) for s, count in candidates):
            everyone = sorted(candidates + short, key=lambda member: member[0].precedence)
            able = {s.tid for s, count in everyone if not s.ended and self._make_room(s, count)}
            for sequence, _ in short:  # it sits this step out, until held or lent pages come back
                if running is not None and sequence.tid not in able and not sequence.ended:
                    running.leave(sequence)
                    self.batch.standing[sequence.tid] = sequence
            candidates = [(s, count) for s, count in candidates if s.tid in able]
        # Whoever was retracted for a member of higher precedence is out again.
        plan = [(sequence, count) for sequence, count in candidates if not sequence.ended]
        seated = running is not None and len(running) > 0
        if not plan and not seated:
            return False
        for sequence, _ in plan:
            self.ledger.lend(sequence.lease)
        self.batch.under_way = plan
        rows = [sequence.row(count) for sequence, count in plan]
        if running is not None and seated:
            running.under_way = True
            self.thread.submit(rows, running.seats)
        else:
            self.thread.submit(rows)
        return True

    def _seat(self, running: Running) -> None:
        for sequence in [sequence for sequence in self.batch.standing.values() if sequence.can_sit]:
            if sequence.computed < self.page_size * len(sequence.pages):
                del self.batch.standing[sequence.tid]
                running.sit(sequence)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Pages for its next tokens. When the pool has none, members of lower precedence are retracted, the last
        first; with none of those left it sits this step out, until held or lent pages come back."""
        missing = pages_for(sequence.computed + count, self.page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        if sequence.seat is not None:
            missing = max(missing, self._ahead(sequence))
        while (grown := self.ledger.grow(sequence.tid, missing)) is None:
            juniors = [s for s in self.batch.members.values() if s.precedence > sequence.precedence]
            if not juniors:
                return False
            self.tell.retract(max(juniors, key=lambda junior: junior.precedence))
        sequence.pages.extend(grown)
        if self.running is not None:
            self.running.grow(sequence, grown)
        return True

    def _ahead(self, sequence: Sequence) -> int:
        """Pages that its answer may yet need and that it can take now: if everyone took as many, half of what is free
        would be left."""
        whole = pages_for(sequence.prompt_tokens + sequence.sampling.max_tokens, self.page_size)
        return min(AHEAD, whole - len(sequence.pages), self.ledger.pool.free // (2 * len(self.batch)))

    def collect(self) -> bool:
        """Applies the step that has ended, if one has."""
        end = self.thread.take()
        if end is None:
            return False
        plan, self.batch.under_way = self.batch.under_way, []
        self.probing += all(sequence.probe for sequence, _ in plan) and end.tokens is None
        for sequence, _ in plan:
            self.ledger.close(sequence.lease, sequence.completed)
        if self.running is not None and end.tokens is not None:
            for sequence, error in self.running.ended(end.tokens, end.seat_errors):
                self.tell.failed(sequence, error)
        for index, (sequence, count) in enumerate(plan):
            if not sequence.probe:
                self.prompt_tokens_computed += max(0, min(count, sequence.prompt_tokens - sequence.computed))
            if sequence.ended:
                continue
            if index in end.errors:
                self.tell.failed(sequence, end.errors[index])
                continue
            sequence.todo -= count
            sequence.landed = ()
            self.tell.computed(sequence, end.results[index])
        return True


def failure(sequence: Sequence, error: Exception) -> tuple[int, str]:
    """Status and reason of a member whose step failed. A grammar that met its limits is its client's mistake."""
    if isinstance(error, TooComplexError):
        return 400, f"its grammar: {error}"
    log.error("it failed in the engine", exc_info=error, extra={"rid": sequence.rid, "transfer": str(sequence.tid)})
    return 500, f"the engine failed: {error}"
