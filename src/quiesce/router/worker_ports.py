"""Ports of single workers, for the routers of others: one leg comes in, one leg goes out, the rest is the hand-off's.

A router of SGLang's kind sends one request to a prefill worker and to a decode worker, each with the address of the
prefill worker's bootstrap port and a room. Here each port stands for one worker. The address is looked up among the
workers that are registered and never connected to, so it opens no way to other hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quiesce.api.backend import Ask, Bootstrap, Verdict
from quiesce.api.errors import ApiError, invalid, unavailable
from quiesce.core.admission import effective_limit
from quiesce.core.messages import Ended, Inspected
from quiesce.router import request as rq
from quiesce.router.calls import Call, Work
from quiesce.router.registry import Worker

if TYPE_CHECKING:
    from quiesce.router.dispatch import Dispatcher

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class PrefillMachine(rq.RequestMachine):
    """A prefill leg whose decode leg is somebody else's: it is whole when it was handed over."""

    def _on(self, event: rq.Event) -> list[rq.Action]:
        return [rq.SendStart("prefill")] if isinstance(event, rq.Begin) else super()._on(event)

    def _ended(self, side: rq.Side, ended: Ended) -> list[rq.Action]:
        actions = super()._ended(side, ended)
        if self.verdict is None and ended.outcome == "handed_over":
            actions += self._finish(Verdict("length", None, ended.cached_tokens), "it was handed over")
        return actions


class LoneCall(Call):
    """One leg. It is never tried again: where else is its router's business."""

    lone = True

    def __init__(self, work: Work, index: int, ask: Ask, workers: dict[rq.Side, Worker], peer: Worker | None) -> None:
        self._peer = peer
        super().__init__(work, index, ask, workers)

    def attempt(self, workers: dict[rq.Side, Worker]) -> None:
        super().attempt(workers)
        if self.ask.bootstrap is not None:
            self.room = self.ask.bootstrap.room
        wishes = self.ask.sampling
        prompt = 0 if wishes.prompt_logprobs is None or self._peer is not None else len(self.ask.token_ids)
        if "prefill" in workers:
            self.machine = PrefillMachine(("prefill",), False, prompt)
        else:
            self.machine = rq.RequestMachine(("decode",), wishes.logprobs is not None, prompt)

    def prefill_of(self, side: rq.Side) -> Worker | None:
        return self._peer if side == "decode" else None


class Ports:
    """Which worker each port stands for. `hosts`: names by which routers may know this machine."""

    def __init__(self, names: Mapping[str, int], hosts: frozenset[str]) -> None:
        self.names = dict(names)
        self._by_port = {port: name for name, port in names.items()}
        self._hosts = hosts | LOOPBACK

    def prefill(self, given: Bootstrap, workers: Mapping[str, Worker]) -> Worker:
        """The registered prefill worker of that bootstrap address. Raises ApiError 400 for any other, 503 when it is
        one that is not there now."""
        if given.host not in self._hosts:
            raise invalid(
                "bootstrap_host", f"{given.host[:100]!r} is no registered peer of this worker", "unknown_peer"
            )
        if given.port is None:
            prefills = [name for name in self.names if name in workers and workers[name].role == "prefill"]
            if len(prefills) != 1:
                text = f"must be there, as {len(prefills)} prefill workers have ports here"
                raise invalid("bootstrap_port", text, "unknown_peer")
            return workers[prefills[0]]
        name = self._by_port.get(given.port)
        if name is None:
            text = (
                f"{given.port} is no registered peer's; a prefill worker's bootstrap port is its own HTTP port here"
            )
            raise invalid("bootstrap_port", text, "unknown_peer")
        worker = workers.get(name)
        if worker is None:
            raise unavailable(f"prefill worker {name} is not registered now", "no_workers")
        if worker.role != "prefill":
            raise invalid("bootstrap_port", f"{given.port} is {name}'s, which is no prefill worker", "unknown_peer")
        return worker


class WorkerPort:
    """The backend of one worker's port."""

    def __init__(self, dispatcher: Dispatcher, name: str, ports: Ports) -> None:
        self.name = name
        self.port = ports.names[name]
        self._dispatcher = dispatcher
        self._ports = ports
        self._open: list[LoneCall] = []
        self._loop = asyncio.get_running_loop()

    @property
    def worker(self) -> Worker | None:
        return self._dispatcher.registry.workers.get(self.name)

    def context_limit(self) -> int | None:
        """The one that all workers have agreed on, as a leg here is one of two; its own where it is in no pair."""
        worker = self.worker
        if worker is None:
            return None
        own = effective_limit(worker.latest.limits)
        return min(own, self._dispatcher.agreed_limit() or own)

    def refusal(self) -> ApiError | None:
        if self._dispatcher.draining:
            return unavailable("the server is shutting down", "draining", retry_after=5)
        worker = self.worker
        if worker is None:
            return unavailable(f"{self.name} is not registered", "no_workers")
        trouble = worker.trouble(self._loop.time(), self._dispatcher.registry.patience)
        return None if trouble is None else unavailable(f"{self.name}: {trouble}", "no_workers")

    def open(self, asks: Sequence[Ask]) -> Work:
        if (refusal := self.refusal()) is not None:
            raise refusal
        worker = self.worker
        assert worker is not None
        if len(worker.legs) + len(asks) > worker.latest.limits.max_queued:
            raise unavailable(f"{self.name} has {len(worker.legs)} requests, about as many as it takes", "overloaded")
        peers = [self._peer(worker, ask) for ask in asks]
        work = Work(self._dispatcher.feed)
        side: rq.Side = "prefill" if worker.role == "prefill" else "decode"
        calls = [LoneCall(work, i, ask, {side: worker}, peers[i]) for i, ask in enumerate(asks)]
        self._open = [call for call in self._open if not call.over] + calls
        work.calls.extend(calls)
        self._dispatcher.begin(work)
        return work

    def _peer(self, worker: Worker, ask: Ask) -> Worker | None:
        if worker.role == "colocated":
            return None
        if ask.bootstrap is None:
            text = f"must be there: {self.name} does one half of a request, and a router pairs it with the other"
            raise invalid("bootstrap_room", text, "no_bootstrap")
        prefill = self._ports.prefill(ask.bootstrap, self._dispatcher.registry.workers)
        if worker.role == "decode":
            return prefill
        if prefill is not worker:
            raise invalid("bootstrap_port", f"is {prefill.name}'s, but this is {self.name}", "unknown_peer")
        return None

    def abort(self, name: str | None, tenant: str | None) -> int:
        """Ends the requests of exactly this id, or all; how many. `tenant`: whose alone; None: anybody's."""
        ended = 0
        for call in self._open:
            named = name is None or name in (call.ask.label, call.ask.rid, call.ask.rid.partition("-")[0])
            if named and tenant in (None, call.ask.tenant) and not call.over:
                ended += 1
                self._dispatcher.feed(call, rq.GaveUp(400, "the request was aborted by /abort_request", "aborted"))
        return ended

    def health(self) -> tuple[bool, dict[str, Any]]:
        refusal = self.refusal()
        return refusal is None, {"name": self.name, "missing": [] if refusal is None else [refusal.message]}

    async def probe(self, timeout: float) -> dict[str, float | str]:
        return await self._dispatcher.probe(timeout, only=self.name)

    def ready(self, role: str) -> bool:
        worker = self.worker
        return worker is not None and worker.role == role and self.refusal() is None

    async def inspect(self, timeout: float, page: int | None = None) -> dict[str, Inspected | str]:
        return await self._dispatcher.inspect(timeout, page, only=self.name)

    def counters(self) -> dict[str, int]:
        return self._dispatcher.counters()

    def legs(self) -> dict[str, int]:
        return {self.name: self._dispatcher.legs().get(self.name, 0)}
