"""The colocated worker: one engine, prompt and answer, no hand-off. The baseline, and the oracle of the tests."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Literal

from quiesce.core.admission import pages_for
from quiesce.core.messages import Sample, TransferId
from quiesce.engine.engine import Engine, Result
from quiesce.roles.generation import Generation, Owner
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.report import generation_samples
from quiesce.roles.sequence import Outcome, Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.worker import Worker

log = logging.getLogger("quiesce.colocated")


class ColocatedWorker(Worker):
    role = "colocated"

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        super().__init__(settings, engine)
        self.generation = Generation(
            self.ledger,
            self.batch,
            self.legs,
            page_size=settings.page_size,
            eos=frozenset(engine.eos_ids),
            owner=Owner(self._finished_leg, self._own, lambda tid, reason: self._end(tid)),
            conservativeness=settings.schedule_conservativeness,
        )
        self.waiting: deque[WorkerLeg] = deque()
        self.minted = 0

    def peers_turn(self) -> None:
        """It has no peers."""

    def start(self, leg: WorkerLeg) -> None:
        self.waiting.append(leg)

    def give_up(self, leg: WorkerLeg, outcome: Literal["cancelled", "failed"], status: int, reason: str) -> None:
        self.say_end(leg, outcome, status, reason)
        tid = self.generation.tids.get(leg.rid)
        if tid is not None:
            self._leave(tid)
        elif not self.generation.forget(leg) and leg in self.waiting:
            self.waiting.remove(leg)

    def schedule(self) -> None:
        self.generation.resume()
        for leg in sorted(self.waiting, key=lambda leg: leg.start.priority):
            if not self.generation.fits(leg):
                return
            tid = self._own(pages_for(len(leg.start.token_ids), self.settings.page_size))
            if tid is None:
                return
            self.waiting.remove(leg)
            self.generation.admit(leg, tid)
            self.generation.sequence(tid, computed=0)

    def _own(self, pages: int) -> TransferId | None:
        tid = TransferId(self.epoch, self.minted + 1)
        if self.ledger.own(tid, pages) is None:
            return None
        self.minted += 1
        return tid

    def rid_of(self, tid: TransferId) -> str | None:
        leg = self.generation.by_tid.get(tid)
        return None if leg is None else leg.rid

    def retract(self, sequence: Sequence) -> None:
        self.generation.retract(sequence)

    def computed(self, sequence: Sequence, result: Result) -> None:
        self.generation.computed(sequence, result)

    def step_failed(self, sequence: Sequence, error: Exception) -> None:
        log.error(
            "it failed in the engine", exc_info=error, extra={"rid": sequence.rid, "transfer": str(sequence.tid)}
        )
        self.give_up(self.generation.by_tid[sequence.tid], "failed", 500, f"the engine failed: {error}")

    def _finished_leg(self, leg: WorkerLeg, outcome: Outcome) -> None:
        self.say_end(leg, outcome)
        self._leave(self.generation.tids[leg.rid])

    def _leave(self, tid: TransferId) -> None:
        self.generation.leave(tid)
        self._end(tid)

    def _end(self, tid: TransferId) -> None:
        self.ledger.end(tid)

    def samples(self) -> list[Sample]:
        return generation_samples(self.generation)

    def tables(self) -> dict[str, Any]:
        return {
            "waiting": len(self.waiting),
            "promised": self.generation.promises.promised,
            "retracted": len(self.generation.retracted),
            "retractions": self.generation.retractions,
        }


def run(settings: WorkerSettings) -> int:
    from quiesce.roles.assembly import make_engine  # noqa: PLC0415  (torch loads here)

    return ColocatedWorker(settings, make_engine(settings)).run()
