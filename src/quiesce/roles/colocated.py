"""The colocated worker: one engine, prompt and answer, no hand-off. The baseline, and the oracle of the tests."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Literal

from quiesce.core.admission import pages_for
from quiesce.core.messages import TransferId
from quiesce.engine.engine import Engine
from quiesce.roles.generation import Generation
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.sequence import Outcome, Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.worker import Worker

log = logging.getLogger("quiesce.colocated")


class ColocatedWorker(Worker):
    role = "colocated"

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        super().__init__(settings, engine)
        self.generation = Generation(
            self.ledger, self.batch, self.legs, settings.page_size, frozenset(engine.eos_ids), self._finished_leg
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
        elif leg in self.waiting:
            self.waiting.remove(leg)

    def schedule(self) -> None:
        while self.waiting and self.generation.fits(self.waiting[0]):
            leg = self.waiting[0]
            tid = TransferId(self.epoch, self.minted + 1)
            if self.ledger.own(tid, pages_for(len(leg.start.token_ids), self.settings.page_size)) is None:
                return
            self.minted += 1
            self.waiting.popleft()
            self.generation.admit(leg, tid)
            self.generation.sequence(tid, computed=0)

    def computed(self, sequence: Sequence, token: int | None) -> None:
        if token is not None:
            self.generation.take(sequence, token)

    def step_failed(self, sequence: Sequence, error: Exception) -> None:
        log.error("request %s failed in the engine", sequence.rid, exc_info=error)
        self.give_up(self.generation.by_tid[sequence.tid], "failed", 500, f"the engine failed: {error}")

    def _finished_leg(self, leg: WorkerLeg, outcome: Outcome) -> None:
        self.say_end(leg, outcome)
        self._leave(self.generation.tids[leg.rid])

    def _leave(self, tid: TransferId) -> None:
        self.generation.leave(tid)
        self.ledger.end(tid)

    def tables(self) -> dict[str, Any]:
        return {"waiting": len(self.waiting), "promised": self.generation.promises.promised}


def run(settings: WorkerSettings) -> int:
    from quiesce.roles.assembly import make_engine  # noqa: PLC0415  (torch loads here)

    return ColocatedWorker(settings, make_engine(settings)).run()
