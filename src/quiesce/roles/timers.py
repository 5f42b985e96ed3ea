"""The clock of a role: machines say what to arm, this keeps when it fires. Local monotonic time only."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from quiesce.core.machine import Arm, Fired, Timer
from quiesce.core.messages import Leg, TransferId

REPEAT_FIRST = 0.05
REPEAT_MOST = 2.0
REFENCE_FIRST = 0.5
REFENCE_MOST = 30.0
AT_ONCE = 64  # of one kind of work in one turn of a worker's loop; the rest has the next turn


@dataclass(frozen=True)
class Delays:
    """Seconds until a timer fires, by kind and attempt. `hold` is --hold-timeout."""

    hold: float = 30.0
    jitter: Callable[[], float] = random.random

    def of(self, arm: Arm) -> float:
        if arm.delay_ms is not None:
            return arm.delay_ms / 1000
        if arm.timer is Timer.HOLD:
            return self.hold
        first, most = (REPEAT_FIRST, REPEAT_MOST) if arm.timer is Timer.REPEAT else (REFENCE_FIRST, REFENCE_MOST)
        return float(min(most, first * 2 ** min(arm.attempt, 16)) * (0.75 + 0.5 * self.jitter()))


class Timers:
    """Named deadlines. Arming a name again replaces it; a cancelled one never fires."""

    def __init__(self, delays: Delays, now: Callable[[], float] = time.monotonic) -> None:
        self._delays = delays
        self._now = now
        self._heap: list[tuple[float, int, Hashable, object]] = []
        self._live: dict[Hashable, int] = {}
        self._count = 0

    def arm(self, arm: Arm) -> None:
        self.after(self._delays.of(arm), (arm.timer, arm.about), Fired(arm.timer, arm.about, arm.attempt))

    def after(self, seconds: float, name: Hashable, payload: object) -> None:
        self._count += 1
        self._live[name] = self._count
        heapq.heappush(self._heap, (self._now() + seconds, self._count, name, payload))

    def soon(self) -> None:
        """The next turn comes at once: this one has left something."""
        self.after(0.0, "soon", lambda: None)

    def cancel(self, name: Hashable) -> None:
        self._live.pop(name, None)
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def forget(self, about: TransferId | Leg) -> None:
        """Cancels every machine timer about one thing."""
        for timer in Timer:
            self.cancel((timer, about))

    def due(self, most: int = AT_ONCE) -> list[object]:
        """What has fired since the last call, in order; what is more than `most` has to wait for the next call."""
        fired: list[object] = []
        now = self._now()
        while self._heap and self._heap[0][0] <= now and len(fired) < most:
            _, count, name, payload = heapq.heappop(self._heap)
            if self._live.get(name) == count:
                del self._live[name]
                fired.append(payload)
        return fired

    def wait(self, most: float) -> float:
        """Seconds until the next one, at most `most`."""
        if not self._heap:
            return most
        return max(0.0, min(most, self._heap[0][0] - self._now()))

    def __len__(self) -> int:
        return len(self._live)
