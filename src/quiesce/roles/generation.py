"""The answer's half of a request, the same on decode and colocated workers: promise, batch, tokens, last word."""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core.admission import Promises, pages_for
from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.roles.legs import Legs, WorkerLeg
from quiesce.roles.sequence import Batch, Outcome, Sequence


class Generation:
    """`finished(leg, outcome)` is told once per request that ran to its end."""

    def __init__(
        self,
        ledger: Ledger,
        batch: Batch,
        legs: Legs,
        page_size: int,
        eos: frozenset[int],
        finished: Callable[[WorkerLeg, Outcome], None],
    ) -> None:
        self.ledger = ledger
        self.batch = batch
        self.legs = legs
        self.page_size = page_size
        self.eos = eos
        self.finished = finished
        self.promises = Promises(ledger.pool.count)
        self.by_tid: dict[TransferId, WorkerLeg] = {}
        self.tids: dict[str, TransferId] = {}
        self.sequences: dict[TransferId, Sequence] = {}

    def pages_promised(self, leg: WorkerLeg) -> int:
        """Pages it may come to need: whoever is admitted can finish."""
        return pages_for(len(leg.start.token_ids) + leg.start.sampling.max_tokens, self.page_size)

    def fits(self, leg: WorkerLeg) -> bool:
        census = self.ledger.census()
        return len(self.promises) < self.batch.max_running and self.promises.fits(
            self.pages_promised(leg), census.held + census.retained
        )

    def admit(self, leg: WorkerLeg, tid: TransferId) -> None:
        self.promises.make(tid, self.pages_promised(leg))
        self.by_tid[tid] = leg
        self.tids[leg.rid] = tid

    def sequence(self, tid: TransferId, computed: int) -> Sequence:
        """Joins the batch with the pages it owns."""
        leg = self.by_tid[tid]
        prompt = leg.start.token_ids
        sequence = Sequence(
            tid=tid,
            rid=leg.rid,
            prompt_tokens=len(prompt),
            tokens=list(prompt),
            sampling=leg.start.sampling,
            eos=self.eos,
            pages=list(self.ledger.pages(tid)),
            computed=computed,
        )
        self.sequences[tid] = sequence
        self.batch.add(sequence)
        return sequence

    def take(self, sequence: Sequence, token: int) -> None:
        """A sampled token goes out; the request may be finished by it."""
        leg = self.by_tid[sequence.tid]
        outcome = sequence.append(token)
        self.legs.tokens(leg, token)
        if outcome is not None:
            self.finished(leg, outcome)

    def leave(self, tid: TransferId) -> None:
        """Forgets the request here; its pages are the ledger's. Idempotent (guard D2)."""
        leg = self.by_tid.pop(tid, None)
        if leg is not None:
            del self.tids[leg.rid]
        sequence = self.sequences.pop(tid, None)
        if sequence is not None:
            self.batch.remove(sequence)
        self.promises.end(tid)
