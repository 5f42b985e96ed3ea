"""What can be asked of the router at any time: whether it can serve, what it counts, how its workers are."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Set
from typing import Any

from quiesce.api.errors import ApiError, unavailable
from quiesce.core.messages import Inspected, Wire
from quiesce.router import pairing
from quiesce.router.calls import Call
from quiesce.router.health import Standing, report
from quiesce.router.inspections import Inspections
from quiesce.router.links import Links
from quiesce.router.probes import Probes
from quiesce.router.registry import Registry, Worker

COUNTED = (
    *("answers_started", "answers_ended", "requests_begun", "retries", "failovers"),
    *("late_messages", "cancels_unanswered", "stray_messages"),
)


class Looking:
    """The half of the dispatcher that changes nothing about requests."""

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop) -> None:
        self.registry = registry
        self.epoch = secrets.randbits(64)
        self.draining = False
        self._loop = loop
        self._links: Links | None = None
        self._calls: dict[str, Call] = {}
        self._counts: Counter[str] = Counter()
        self._told = 0  # the limit that workers are told; 0: no two of them are a pair
        self._moved = loop.time()  # when a worker last said anything about a request
        self.counted_elsewhere: list[Callable[[], dict[str, int]]] = []
        self._inspections = Inspections(self._send)
        self._probes = Probes(self.epoch, self._send, loop.time)

    def _usable(self, avoid: Set[int] = frozenset()) -> list[Worker]:
        workers = [worker for worker in self.registry.workers.values() if worker.epoch not in avoid]
        return pairing.usable(workers, self._loop.time(), self.registry.patience)

    def context_limit(self) -> int | None:
        """Of every registered worker and not of those alone that could take work now: a limit that came and went with
        heartbeats would be none."""
        return None if pairing.missing(self._usable()) else self.agreed_limit()

    def agreed_limit(self) -> int | None:
        return pairing.agreed_limit(self.registry.workers.values())

    def refusal(self) -> ApiError | None:
        if self.draining:
            return unavailable("the server is shutting down", "draining", retry_after=5)
        why = pairing.missing(self._usable(), self.registry.workers.values())
        if why:
            return unavailable(f"no workers can serve this now: {'; '.join(why)}; see /health", "no_workers")
        return None

    def health(self) -> tuple[bool, dict[str, Any]]:
        began = min((call.began for call in self._calls.values()), default=None)
        work = Standing(len(self._calls), began, self._moved)
        return report(self.registry, self._loop.time(), self.draining, work)

    async def probe(self, timeout: float, only: str | None = None) -> dict[str, float | str]:
        """`only`: one worker by its name, here and in `inspect`."""
        return await self._probes.all(self._asked(only), timeout)

    def _asked(self, only: str | None) -> list[Worker]:
        return [worker for worker in self.registry.workers.values() if only in (None, worker.name)]

    def ready(self, role: str) -> bool:
        return any(worker.role == role for worker in self._usable()) and not self.draining

    async def inspect(
        self, timeout: float, page: int | None = None, only: str | None = None
    ) -> dict[str, Inspected | str]:
        return await self._inspections.ask(self._asked(only), timeout, page)

    def counters(self) -> dict[str, int]:
        links = self._links.counters() if self._links else {}
        registry = {"registrations_refused": self.registry.refused, "breakers_opened": self.registry.breakers_opened}
        found = {name: self._counts[name] for name in COUNTED} | links | registry
        for counters in self.counted_elsewhere:
            found |= counters()
        return found

    def legs(self) -> dict[str, int]:
        return {worker.name: len(worker.legs) for worker in self.registry.workers.values()}

    def _send(self, worker: Worker, message: Wire) -> bool:
        return self._links is not None and self._links.send(worker, message)
