"""Readers that are neither attached nor heard of: a transport that cannot see a process die never says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

FORGOTTEN = 600.0  # seconds; whoever was away for longer has to start anew
PAUSE = 1.0  # seconds after which this process itself was away, and not those that it did not hear of
ATTACH_LEAST = 15.0  # seconds that a peer's transport gets to start, a process or an agent, whatever the hold timeout


@dataclass
class Silence:
    now: Callable[[], float] = time.monotonic
    _heard: dict[int, float] = field(default_factory=dict)  # epoch -> when it last said something

    def heard(self, epoch: int) -> None:
        self._heard[epoch] = self.now()

    def forget(self, epoch: int) -> None:
        self._heard.pop(epoch, None)

    def gone(self, attached: Callable[[int], bool], owing: Iterable[int]) -> list[int]:
        """Epochs to be given up for good: silent for long, not `attached`, and owing no proof."""
        kept = set(owing)
        return [
            epoch
            for epoch, at in self._heard.items()
            if self.now() - at > FORGOTTEN and epoch not in kept and not attached(epoch)
        ]
