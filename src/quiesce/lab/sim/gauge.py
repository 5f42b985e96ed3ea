"""A number over virtual time: its mean, its quantiles, its most."""

from __future__ import annotations

from collections import defaultdict


class Gauge:
    """A number over virtual time: how long it had each value."""

    def __init__(self) -> None:
        self.value = 0
        self.since = 0.0
        self.seconds: dict[int, float] = defaultdict(float)

    def set(self, value: int, now: float) -> None:
        if value != self.value:
            self.seconds[self.value] += now - self.since
            self.value, self.since = value, now

    def end(self, now: float) -> None:
        self.seconds[self.value] += now - self.since
        self.since = now

    @property
    def mean(self) -> float:
        total = sum(self.seconds.values())
        return sum(value * spent for value, spent in self.seconds.items()) / total if total else 0.0

    def quantile(self, share: float) -> int:
        """The value that it did not exceed for that share of the time."""
        total, seen = sum(self.seconds.values()), 0.0
        for value in sorted(self.seconds):
            seen += self.seconds[value]
            if seen >= share * total:
                return value
        return 0

    @property
    def most(self) -> int:
        return max(self.seconds, default=0)
