"""The colocated worker: one engine, prompt and answer, no hand-off. The baseline, and the oracle of the tests."""

from __future__ import annotations

import logging

from quiesce.core.messages import Sample, TransferId
from quiesce.engine.engine import Engine
from quiesce.roles.answering import AnsweringWorker
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.report import generation_samples
from quiesce.roles.settings import WorkerSettings

log = logging.getLogger("quiesce.colocated")


class ColocatedWorker(AnsweringWorker):
    role = "colocated"

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        super().__init__(settings, engine)
        self.minted = 0

    def peers_turn(self) -> None:
        """It has no peers."""

    def start(self, leg: WorkerLeg) -> None:
        self.waiting.append(leg)

    def schedule(self) -> None:
        self.generation.resume()
        for leg in sorted(self.waiting, key=lambda leg: leg.start.priority):
            if not self.begin_local(leg):
                return

    def local(self, pages: int) -> TransferId | None:
        tid = TransferId(self.epoch, self.minted + 1)
        if self.ledger.own(tid, pages) is None:
            return None
        self.minted += 1
        return tid

    def release(self, tid: TransferId, reason: str) -> None:
        self.ledger.end(tid)

    def samples(self) -> list[Sample]:
        return generation_samples(self.generation)


def run(settings: WorkerSettings) -> int:
    from quiesce.roles.assembly import make_engine  # noqa: PLC0415  (torch loads here)

    return ColocatedWorker(settings, make_engine(settings)).run()
