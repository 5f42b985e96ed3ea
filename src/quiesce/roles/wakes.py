"""What a loop waits for, and what of it has something to say: to look where nothing is costs as much as work."""

from __future__ import annotations

from typing import Any

import zmq


class Wakes(zmq.Poller):
    """`named`: what the latest `poll` found readable."""

    def __init__(self) -> None:
        super().__init__()
        self.named: set[Any] = set()

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        found = super().poll(timeout)
        self.named = {readable for readable, _ in found}
        return found

    def any_of(self, *readables: Any) -> bool:
        """Whether the latest `poll` has named one of them."""
        return not self.named.isdisjoint(readables)
