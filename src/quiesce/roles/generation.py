"""The answer's half of a request, the same on decode and colocated workers: promise, batch, tokens, retraction."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from quiesce.core.admission import Promises, pages_for
from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.engine.engine import Result
from quiesce.engine.sampler import Sampled
from quiesce.roles.legs import Legs, WorkerLeg
from quiesce.roles.sequence import Batch, Outcome, Sequence

USAGE_MEMORY = 0.05  # weight of the newest answer in the share of max_tokens that answers use


@dataclass(frozen=True)
class Owner:
    """What the role does for a request's pages and its last word."""

    finished: Callable[[WorkerLeg, Outcome], None]
    local: Callable[[int], TransferId | None]  # pages for a request that computes its own prompt
    release: Callable[[TransferId, str], None]
    belongs: Callable[[TransferId, str], None]  # whose the pages of a transfer are


class Generation:
    """`conservativeness`: how much of what running requests may still need is kept for them. 1: the share of
    max_tokens that answers have used lately, all of it at first. 0: nothing, so that retraction does the rest."""

    def __init__(
        self,
        ledger: Ledger,
        batch: Batch,
        legs: Legs,
        *,
        page_size: int,
        eos: frozenset[int],
        owner: Owner,
        conservativeness: float = 1.0,
    ) -> None:
        self.ledger = ledger
        self.batch = batch
        self.legs = legs
        self.page_size = page_size
        self.eos = eos
        self.owner = owner
        self.conservativeness = conservativeness
        self.usage = 1.0
        self.promises = Promises(ledger.pool.count)
        self.by_tid: dict[TransferId, WorkerLeg] = {}
        self.tids: dict[str, TransferId] = {}
        self.sequences: dict[TransferId, Sequence] = {}
        self.retracted: list[tuple[WorkerLeg, list[int]]] = []
        self.retractions = 0
        self._seated: list[Sequence] = []  # for whom `_addressed` was made
        self._addressed: dict[bytes, tuple[list[int], list[str]]] = {}  # router -> seats, requests

    # ------------------------------------------------------------ admission

    def pages_promised(self, leg: WorkerLeg) -> int:
        """Pages kept for it: its prompt, and what answers like it have come to need."""
        wanted = leg.start.sampling.max_tokens
        expected = min(wanted, max(1, math.ceil(wanted * self.usage * self.conservativeness)))
        return pages_for(max(leg.prompt_tokens + expected, len(leg.start.token_ids) + 1), self.page_size)

    def fits(self, leg: WorkerLeg) -> bool:
        """Whoever was retracted goes first: while one waits, nobody new is let in."""
        census = self.ledger.census()
        return (
            not self.retracted
            and len(self.promises) < self.batch.max_running
            and self.promises.fits(self.pages_promised(leg), census.held + census.retained)
        )

    def admit(self, leg: WorkerLeg, tid: TransferId) -> None:
        self._enrol(leg, tid, self.pages_promised(leg))
        leg.left_queue = time.monotonic()

    def _enrol(self, leg: WorkerLeg, tid: TransferId, pages: int) -> None:
        self.promises.make(tid, pages)
        leg.tid = tid
        self.by_tid[tid] = leg
        self.tids[leg.rid] = tid
        self.owner.belongs(tid, leg.start.tenant)

    def sequence(self, tid: TransferId, *, computed: int, tokens: list[int] | None = None) -> Sequence:
        """Joins the batch with the pages it owns."""
        leg = self.by_tid[tid]
        known = list(leg.start.token_ids) if tokens is None else tokens
        sequence = Sequence(
            tid=tid,
            rid=leg.rid,
            prompt_tokens=leg.prompt_tokens,
            tokens=known,
            sampling=leg.start.sampling,
            eos=self.eos,
            precedence=(leg.start.priority, leg.arrived),
            probe=leg.start.probe,
            pages=array("i", self.ledger.pages(tid)),
            todo=len(known) - computed,
            scored=tokens is None and computed == 0,
            grammar=leg.grammar,
        )
        leg.tokens = known
        self.sequences[tid] = sequence
        self.batch.add(sequence)
        return sequence

    # ------------------------------------------------------------ the answer

    def computed(self, sequence: Sequence, result: Result) -> None:
        """What a step gave: worths of the prompt while it is being computed, then a token."""
        if sequence.scored and sequence.sampling.prompt_logprobs is not None:
            self.legs.prompt_logprobs(self.by_tid[sequence.tid], sequence.computed, result.prompt_logprobs)
            sequence.scored = sequence.computed < sequence.prompt_tokens
        if result.sampled is not None:
            self.take(sequence, result.sampled)

    def take(self, sequence: Sequence, sampled: Sampled) -> None:
        """A sampled token goes out; the request may be finished by it."""
        outcome = sequence.append(sampled.token)
        self.legs.tokens(self.by_tid[sequence.tid], sampled)
        if outcome is not None:
            self.finished(sequence, outcome)

    def streamed(self, sequences: list[Sequence], tokens: list[int]) -> None:
        """The tokens of those who sit go out."""
        if self._seated != sequences:
            self._seated = list(sequences)
            legs = [self.by_tid[sequence.tid] for sequence in sequences]
            self._addressed = {}
            for at, leg in enumerate(legs):
                ats, rids = self._addressed.setdefault(leg.router, ([], []))
                ats.append(at)
                rids.append(leg.rid)
        for router, (ats, rids) in self._addressed.items():
            self.legs.drawn(router, rids, tokens if len(ats) == len(tokens) else [tokens[at] for at in ats])

    def finished(self, sequence: Sequence, outcome: Outcome) -> None:
        if not sequence.probe:
            used = sequence.generated / sequence.sampling.max_tokens
            self.usage += USAGE_MEMORY * (used - self.usage)
        self.owner.finished(self.by_tid[sequence.tid], outcome)

    def leave(self, tid: TransferId) -> None:
        """Forgets the request here; its pages are the ledger's. Idempotent (guard D2)."""
        leg = self.by_tid.pop(tid, None)
        if leg is not None:
            del self.tids[leg.rid]
        sequence = self.sequences.pop(tid, None)
        if sequence is not None:
            self.batch.remove(sequence)
        self.promises.end(tid)

    # ------------------------------------------------------------ retraction

    def retract(self, sequence: Sequence) -> None:
        """Gives its pages back and keeps its tokens. A step under way is a lease: its pages wait for that, and its
        result is dropped, so what resumes is exactly what the client has seen."""
        leg = self.by_tid[sequence.tid]
        self.retractions += 1
        self.leave(sequence.tid)
        self.retracted.append((leg, sequence.tokens))
        self.retracted.sort(key=lambda waiting: (waiting[0].start.priority, waiting[0].arrived))
        self.owner.release(sequence.tid, "retracted")

    def resume(self) -> None:
        """Takes retracted requests back, in order, each once the pool has room for all it has and a page more."""
        while self.retracted and not self.batch.full:
            leg, tokens = self.retracted[0]
            need = pages_for(len(tokens) + 1, self.page_size)
            census = self.ledger.census()
            if self.promises.promised and not self.promises.fits(need, census.held + census.retained):
                return
            tid = self.owner.local(need)
            if tid is None:
                return
            del self.retracted[0]
            self._enrol(leg, tid, max(need, self.pages_promised(leg)))
            self.sequence(tid, computed=0, tokens=tokens)

    def forget(self, leg: WorkerLeg) -> bool:
        """A retracted request is given up. False: it was not one."""
        before = len(self.retracted)
        self.retracted = [waiting for waiting in self.retracted if waiting[0] is not leg]
        return len(self.retracted) < before
