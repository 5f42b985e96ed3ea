"""Virtual time: one heap of what happens next, and for each process a clock of its own that is a little wrong."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """Calls in order of time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds of true time
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., Any], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call, arguments))

    def after(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """The next call. False: there is none."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        self.events += 1
        call(*arguments)
        return True


class LocalClock:
    """What one process reads: true time, scaled and shifted."""

    def __init__(self, loop: Loop, rate: float = 1.0, offset: float = 0.0) -> None:
        self.loop = loop
        self.rate = rate
        self.offset = offset

    def monotonic(self) -> float:
        return self.offset + self.rate * self.loop.now

    def true(self, local: float) -> float:
        """When this clock will read `local`."""
        return (local - self.offset) / self.rate


class SimTime:
    """Stands where a module of the product has imported `time`: the clock of whichever process is running."""

    def __init__(self, clock: LocalClock) -> None:
        self.current = clock

    def monotonic(self) -> float:
        clock = self.current
        return clock.offset + clock.rate * clock.loop.now

    time = monotonic
