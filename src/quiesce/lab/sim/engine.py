"""A modelled engine: it writes a tag into every page it computes, and looks at the tags of every page it reads.

A page's tag is the token at its start, which says what prompt, what place in it and, for answers, whose. A page has
two halves, so that a copy can be seen half done. Tokens follow from the prompt alone, so every answer is known.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import TransferId
from quiesce.engine.engine import Result
from quiesce.engine.sampler import Sampled
from quiesce.engine.seats import Seats
from quiesce.lab.sim.world import World
from quiesce.roles.engine_thread import StepEnd

VOCABULARY = 1 << 62
ANSWER = 1 << 61


def token_of(last: int, index: int) -> int:
    """Token `index` of the answer to a prompt that ends in `last`."""
    return ANSWER | (last * 1009 + index) & (ANSWER - 1)


class Memory:
    """What is in each half of each page; None: nothing anybody may read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.left: list[int | None] = [None] * count
        self.right: list[int | None] = [None] * count

    def write(self, page: int, tag: int | None) -> None:
        self.left[page] = self.right[page] = tag

    def clear(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.left[page] = self.right[page] = None

    def wrong(self, pages: Sequence[int], tokens: Sequence[int], computed: int, size: int) -> int | None:
        """The first page among those of `tokens[:computed]` that does not hold what it should."""
        left, right = self.left, self.right
        for place in range(-(-computed // size)):
            page, tag = pages[place], tokens[place * size]
            if left[page] != tag or right[page] != tag:
                return page
        return None


class SimEngine:
    """What a worker asks of its engine, without a model."""

    eos_ids: tuple[int, ...] = ()
    grammars = None
    native, how = False, "simulated"

    def __init__(self, world: World, pages: int) -> None:
        self.memory = Memory(pages)
        self.page_size = world.page_size
        self.context_length = 1 << 20
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY)
        self.fingerprint = Fingerprint("sim", "", "tag", "page-major/row", world.page_size, 1 << 16, 1, 1, 1)
        arena = SimpleNamespace(count=pages, page_bytes=1 << 16, fd=None)
        self.kv = SimpleNamespace(pages=pages, arena=arena, copy=self._copy)

    def _copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        for one, other in zip(source, target, strict=False):
            self.memory.left[other] = self.memory.left[one]
            self.memory.right[other] = self.memory.right[one]


class SimThread:
    """As `roles.engine_thread.EngineThread`: a step takes virtual time, reads at its start and writes at its end.

    `plan()`: whose rows these are, those who sit last. `broken(what)`: a page that was read is not what it should be,
    or a page that is written is not its request's any more."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.busy = False
        self.steps = 0
        self.rows: list[Any] = []  # those who sit last
        self.seated: int | None = None
        self.whose: list[TransferId] = []
        self._done: deque[StepEnd] = deque()
        self.plan: Callable[[], list[TransferId]]
        self.later: Callable[[float, Callable[[], None]], None]
        self.foreign: Callable[[int, Any], bool]
        self.broken: Callable[..., None]
        self.rng: random.Random
        self.world: World

    def fileno(self) -> int:
        return -1

    def stop(self) -> None:
        pass

    def submit(self, rows: list[Any], seats: Seats | None = None) -> None:
        assert not self.busy, "one step at a time"
        self.seated = None if seats is None else len(seats)
        self.busy, self.rows, self.whose = True, rows + ([] if seats is None else seats.rows()), self.plan()
        tokens = 0
        for row, tid in zip(self.rows, self.whose, strict=True):
            tokens += len(row.tokens)
            wrong = self.engine.memory.wrong(row.pages, row.history, row.start, self.engine.page_size)
            if wrong is not None:
                self.broken("read", tid, wrong)
                return
        share = tokens / (self.world.chunk + self.world.max_running)
        self.later(self.world.step * (0.5 + share) * (0.9 + 0.2 * self.rng.random()), self._end)

    def _end(self) -> None:
        end = StepEnd([])
        size, memory = self.engine.page_size, self.engine.memory
        for index, (row, tid) in enumerate(zip(self.rows, self.whose, strict=True)):
            last = row.start + len(row.tokens)
            for place in range(row.start // size, -(-last // size)):
                page = row.pages[place]
                if self.foreign(page, tid):
                    self.broken("step", tid, page)
                    return
                if place * size >= row.start:
                    memory.write(page, row.history[place * size])
            if self.world.noise.engine and self.rng.random() < self.world.noise.engine:
                end.errors[index] = RuntimeError("the engine could not compute it")
                end.results.append(Result())
            elif row.sample is None:
                end.results.append(Result())
            else:
                prompt = row.prompt_tokens
                end.results.append(Result(Sampled(token_of(row.history[prompt - 1], last - prompt))))
        if self.seated is not None:
            standing = len(self.rows) - self.seated
            drawn, end.results = end.results[standing:], end.results[:standing]
            end.tokens = np.array([result.sampled.token if result.sampled else 0 for result in drawn], np.int64)
            end.seat_errors = {at - standing: error for at, error in end.errors.items() if at >= standing}
            end.errors = {at: error for at, error in end.errors.items() if at < standing}
        self._done.append(end)

    def take(self) -> StepEnd | None:
        if not self._done:
            return None
        self.busy = False
        self.steps += 1
        return self._done.popleft()
