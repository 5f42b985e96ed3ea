"""What decode and colocated workers share: legs that wait for pages, and answers that run, are retracted and end."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any, Literal

from quiesce.core.admission import pages_for
from quiesce.core.messages import TransferId
from quiesce.engine.engine import Engine, Result
from quiesce.roles.generation import Generation, Owner
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.running import Hearers, Running
from quiesce.roles.sequence import Outcome, Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.steps import failure
from quiesce.roles.worker import Worker


class AnsweringWorker(Worker):
    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        super().__init__(settings, engine)
        self.generation = Generation(
            self.ledger,
            self.batch,
            self.legs,
            page_size=settings.page_size,
            eos=frozenset(engine.eos_ids),
            owner=Owner(self._finished_leg, self.local, self.release, self.budget.belongs),
            conservativeness=settings.schedule_conservativeness,
        )
        hearers = Hearers(self.generation.streamed, self.generation.finished)
        self.steps.run_in(Running(self.ledger, settings.max_running, settings.page_size, hearers))
        self.waiting: deque[WorkerLeg] = deque()

    @abstractmethod
    def local(self, pages: int) -> TransferId | None:
        """Pages and an id for a request that computes its own prompt, or None when there are not enough."""

    @abstractmethod
    def release(self, tid: TransferId, reason: str) -> None:
        """The request's hold on its pages ends."""

    def begin_local(self, leg: WorkerLeg) -> bool:
        """The leg's prompt is computed here. False when the pool has no room for it now."""
        if not self.generation.fits(leg):
            return False
        tid = self.local(pages_for(len(leg.start.token_ids), self.settings.page_size))
        if tid is None:
            return False
        self.waiting.remove(leg)
        self.generation.admit(leg, tid)
        self.generation.sequence(tid, computed=0)
        return True

    def give_up(self, leg: WorkerLeg, outcome: Literal["cancelled", "failed"], status: int, reason: str) -> None:
        self.say_end(leg, outcome, status, reason)
        tid = self.generation.tids.get(leg.rid)
        if tid is not None:
            self._leave(tid, reason)
        elif not self.generation.forget(leg) and leg in self.waiting:
            self.waiting.remove(leg)

    def computed(self, sequence: Sequence, result: Result) -> None:
        self.generation.computed(sequence, result)

    def retract(self, sequence: Sequence) -> None:
        self.generation.retract(sequence)

    def step_failed(self, sequence: Sequence, error: Exception) -> None:
        self.give_up(self.generation.by_tid[sequence.tid], "failed", *failure(sequence, error))

    def rid_of(self, tid: TransferId) -> str | None:
        leg = self.generation.by_tid.get(tid)
        return None if leg is None else leg.rid

    def _finished_leg(self, leg: WorkerLeg, outcome: Outcome) -> None:
        self.say_end(leg, outcome)
        self._leave(self.generation.tids[leg.rid], outcome)

    def _leave(self, tid: TransferId, reason: str) -> None:
        self.generation.leave(tid)
        self.release(tid, reason)

    def tables(self) -> dict[str, Any]:
        return {
            "waiting": len(self.waiting),
            "promised": self.generation.promises.promised,
            "retracted": len(self.generation.retracted),
            "retractions": self.generation.retractions,
        }
