"""Makes a failing world smaller while it still breaks the same rule: fewer requests, fewer faults, less noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quiesce.lab.sim.cluster import Broken, Cluster
from quiesce.lab.sim.run import simulate
from quiesce.lab.sim.story import Story
from quiesce.lab.sim.world import World

T = TypeVar("T")
MOST_RUNS = 150


class Shrinker:
    """`runs` of the simulator are allowed in all. Deterministic."""

    def __init__(self, world: World, broken: Broken, strict: bool, runs: int = MOST_RUNS) -> None:
        self.world = world
        self.broken = broken
        self.strict = strict
        self.left = runs

    def _fails(self, world: World) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        broken = simulate(world, strict=self.strict).broken
        if broken is None or broken.rule != self.broken.rule:
            return False
        self.world, self.broken = world, broken
        return True

    def _without(self, **changes: Any) -> bool:
        return self._fails(dataclasses.replace(self.world, **changes))

    def run(self) -> World:
        self._without(
            requests=tuple(req for req in self.world.requests if req.at <= self.broken.at),
            faults=tuple(fault for fault in self.world.faults if fault.at <= self.broken.at),
        )
        self._without(faults=())
        before = -1
        while before != len(self.world.requests) + len(self.world.faults) and self.left > 0:
            before = len(self.world.requests) + len(self.world.faults)
            self._fewer("requests", lambda: self.world.requests)
            self._fewer("faults", lambda: self.world.faults)
        for name in type(self.world.noise).__dataclass_fields__:
            if getattr(self.world.noise, name) and name not in ("delay", "ordered"):
                self._without(noise=dataclasses.replace(self.world.noise, **{name: 0.0}))
        self._without(skew=0.0)
        return self.world

    def _fewer(self, name: str, now: Callable[[], Sequence[T]]) -> None:
        """Takes pieces out, large ones first."""
        size = max(1, len(now()) // 2)
        while size and now():
            start = 0
            while start < len(now()) and self.left > 0:
                rest = (*now()[:start], *now()[start + size :])
                if name == "requests" and not rest:
                    break
                if not self._without(**{name: rest}):
                    start += size
            size //= 2


def tell(world: World, strict: bool) -> tuple[Broken | None, list[str]]:
    """Runs it once more and listens."""
    cluster = Cluster(world, strict)
    story = Story(cluster)
    report = simulate(world, strict=strict, watch=cluster)
    return report.broken, [] if report.broken is None else story.tell(report.broken)


def shrunk(world: World, broken: Broken, strict: bool, runs: int = MOST_RUNS) -> tuple[World, list[str]]:
    """The smallest world that was found, and its story."""
    small = Shrinker(world, broken, strict, runs).run()
    return small, tell(small, strict)[1]
