"""The engine's own thread: the role's loop hands it a step and goes on answering messages.

One step is under way at a time. `fileno()` becomes readable when it has ended. Where the engine has a loop for steps
of those who sit, the thread is in it, and comes back to Python for all other steps and for one that failed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from quiesce.engine.batch import Row
from quiesce.engine.engine import Result
from quiesce.engine.native.decode_loop import DecodeLoop
from quiesce.engine.seats import Seats


class Stepper(Protocol):
    def run(self, rows: Rows[Row]) -> list[Result]: ...

    def run_seated(self, seats: Seats, rows: Rows[Row]) -> tuple[np.ndarray, list[Result]]: ...

    def decode_loop(self, done: int) -> DecodeLoop | None: ...


@dataclass
class StepEnd:
    """`results[i]` belongs to row i; `errors` names the rows whose computation failed. `tokens` and `seat_errors` are
    of those who sit, where somebody does."""

    results: list[Result]
    errors: dict[int, Exception] = field(default_factory=dict)
    tokens: np.ndarray | None = None
    seat_errors: dict[int, Exception] = field(default_factory=dict)


class EngineThread:
    def __init__(self, engine: Stepper) -> None:
        self._engine = engine
        self._work: SimpleQueue[tuple[list[Row], Seats | None] | None] = SimpleQueue()
        self._done: deque[StepEnd] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = engine.decode_loop(self._signal)
        self._seats: Seats | None = None  # of the step that is under way
        self.busy = False
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._signal

    def submit(self, rows: Rows[Row], seats: Seats | None = None) -> None:
        """`seats`: some of which are taken, and which nobody touches until the step has ended."""
        assert not self.busy, "one step at a time"
        self.busy = True
        self._seats = seats  # known before the step begins: it may have failed before `begin` returns
        if rows or seats is None or self._loop is None or not self._loop.begin(seats):
            self._put((list(rows), seats))

    def _put(self, work: tuple[list[Row], Seats | None] | None) -> None:
        self._work.put(work)
        if self._loop is not None:
            self._loop.interrupt()

    def take(self) -> StepEnd | None:
        """The step that has ended since the last call, if one has."""
        try:
            os.eventfd_read(self._signal)
        except BlockingIOError:
            return None
        self.busy = False
        self.steps += 1
        if self._done:
            return self._done.popleft()
        assert self._loop is not None and self._seats is not None
        return StepEnd([], tokens=self._loop.drawn(len(self._seats)))

    def stop(self) -> None:
        """Lets a step that is under way end first: it is still writing pages."""
        self._put(None)
        self._thread.join()
        if self._loop is not None:
            self._loop.close()
        os.close(self._signal)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._done.append(self._step(*work))
            os.eventfd_write(self._signal, 1)

    def _next(self) -> tuple[list[Row], Seats | None] | None:
        """What is to be done in Python; what the loop can do is done meanwhile."""
        if self._loop is not None and self._loop.run():
            return [], self._seats  # once more: now it says what is the matter, and with whom
        return self._work.get()

    def _step(self, rows: list[Row], seats: Seats | None) -> StepEnd:
        try:
            if seats is None:
                return StepEnd(self._engine.run(rows))
            tokens, results = self._engine.run_seated(seats, rows)
            return StepEnd(results, tokens=tokens)
        except Exception as error:
            if seats is None and len(rows) == 1:
                return StepEnd([Result()], {0: error})
        # One row made the step fail; computing is idempotent, so find it by running each alone: a fault in
        # one request ends that request and nobody else's.
        end = StepEnd([])
        end.results, end.errors = self._each_alone(rows)
        if seats is not None:
            drawn, end.seat_errors = self._each_alone(seats.rows())
            end.tokens = np.array([result.sampled.token if result.sampled else 0 for result in drawn], np.int64)
        return end

    def _each_alone(self, rows: list[Row]) -> tuple[list[Result], dict[int, Exception]]:
        results, errors = list[Result](), dict[int, Exception]()
        for index, row in enumerate(rows):
            try:
                results += self._engine.run([row])
            except Exception as error:
                results.append(Result())
                errors[index] = error
        return results, errors
