"""The engine's own thread: the role's loop hands it a step and goes on answering messages.

One step is under way at a time. `fileno()` becomes readable when it has ended.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from quiesce.engine.batch import Row
from quiesce.engine.engine import Result


class Stepper(Protocol):
    def run(self, rows: Rows[Row]) -> list[Result]: ...


@dataclass
class StepEnd:
    """`results[i]` belongs to row i; `errors` names the rows whose computation failed."""

    results: list[Result]
    errors: dict[int, Exception] = field(default_factory=dict)


class EngineThread:
    def __init__(self, engine: Stepper) -> None:
        self._engine = engine
        self._work: deque[list[Row] | None] = deque()
        self._ready = threading.Semaphore(0)
        self._done: deque[StepEnd] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.busy = False
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._signal

    def submit(self, rows: Rows[Row]) -> None:
        assert not self.busy, "one step at a time"
        self.busy = True
        self._work.append(list(rows))
        self._ready.release()

    def take(self) -> StepEnd | None:
        """The step that has ended since the last call, if one has."""
        try:
            os.eventfd_read(self._signal)
        except BlockingIOError:
            return None
        self.busy = False
        self.steps += 1
        return self._done.popleft()

    def stop(self) -> None:
        """Lets a step that is under way end first: it is still writing pages."""
        self._work.append(None)
        self._ready.release()
        self._thread.join()
        os.close(self._signal)

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            rows = self._work.popleft()
            if rows is None:
                return
            self._done.append(self._step(rows))
            os.eventfd_write(self._signal, 1)

    def _step(self, rows: list[Row]) -> StepEnd:
        try:
            return StepEnd(self._engine.run(rows))
        except Exception as error:
            if len(rows) == 1:
                return StepEnd([Result()], {0: error})
        # One row made the step fail; computing is idempotent, so find it by running each alone: a fault in
        # one request ends that request and nobody else's.
        end = StepEnd([])
        for index, row in enumerate(rows):
            try:
                end.results += self._engine.run([row])
            except Exception as error:
                end.results.append(Result())
                end.errors[index] = error
        return end
