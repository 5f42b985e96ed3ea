"""A real router with fake workers: real sockets, keys and messages; only the engines are scripts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio

from quiesce.api.chat import TextModel
from quiesce.channel import AsyncLink, AsyncListener, KeyPair, KeyRing, start_authenticator
from quiesce.core.fingerprint import Fingerprint, Limits
from quiesce.core.messages import (
    Address,
    Cancel,
    Ended,
    Exited,
    Inspect,
    Inspected,
    PromptLogprobs,
    Register,
    Registered,
    Sample,
    Start,
    TokenLogprob,
    Tokens,
)
from quiesce.roles.settings import RouterSettings
from quiesce.router.app import Router
from quiesce.router.registry import Patience

MODEL = "tiny"
FINGERPRINT = Fingerprint("tiny", "w0", "float32", "page-major/row", 16, 4096, 2, 2, 16)
LIMITS = Limits(context_length=512, pool_tokens=4096, max_queued=512)


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Polls a real condition until it is truthy; fails the test at the deadline."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.005)
    return value


def settings_for(keys: Path, model: Path, port: int = 0, **fields: Any) -> RouterSettings:
    quick: dict[str, Any] = {"request_timeout": 30.0, "drain_timeout": 5.0}
    return RouterSettings(
        model=model,
        served_model_name=MODEL,
        keys=keys,
        registry="tcp://127.0.0.1:*",
        port=port,
        **(quick | fields),
    )


@dataclass
class FakeWorker:
    """Answers legs as `reply` says; `hold` makes it keep them open until it is cancelled or told."""

    role: str
    name: str
    keys_folder: Path
    reply: Callable[[Start], Sequence[int]] = lambda start: (40,) * start.sampling.max_tokens
    hold: bool = False
    deaf: bool = False  # does not answer cancels
    on_start: Callable[[FakeWorker, Start], None] | None = None  # what happens as soon as it has a leg
    moving: bool = True  # its engine makes steps
    passes: bool | None = True  # test requests; None: it does not answer them
    fingerprint: Fingerprint = FINGERPRINT
    limits: Limits = LIMITS
    cached_tokens: int = 0
    reported: dict[str, Any] = field(default_factory=dict)  # fields of its heartbeat
    samples: list[Sample] = field(default_factory=list)
    epoch: int = field(default_factory=lambda: random.getrandbits(64))
    starts: dict[str, Start] = field(default_factory=dict)
    cancels: list[Cancel] = field(default_factory=list)
    active: dict[str, bytes] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    routers: list[bytes] = field(default_factory=list)  # of every leg that came
    router_epochs: set[int] = field(default_factory=set)
    told_limits: list[int] = field(default_factory=list)
    progress: int = 0
    silent: bool = False

    def begin(self, registry: str, router_key: str) -> None:
        self.keys = KeyPair.load(self.keys_folder / f"{self.name}.key")
        self.context: zmq.Context[Any] = zmq.Context()
        self.authenticator = start_authenticator(self.context, KeyRing(self.keys_folder / "ring"))
        self.control = AsyncListener(self.context, "tcp://127.0.0.1:*", self.keys)
        self.endpoint = self.control.endpoint
        self.registration = AsyncLink(self.context, registry, router_key, self.keys)
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(work()) for work in (self._beat, self._hear, self._welcomed)]
        self.alive = True

    def kill(self) -> None:
        """As a dead process: its sockets are gone."""
        if self.alive:
            self.alive = False
            for task in self.tasks:
                task.cancel()
            self.control.close()
            self.registration.close()
            self.authenticator.stop()
            self.context.destroy(linger=0)

    def unplug(self) -> None:
        """Its control socket is gone and takes no connection, while its heartbeats go on."""
        self.control.close()

    def plug_in(self) -> None:
        """At the same address; it has forgotten its legs."""
        self.active.clear()
        end = time.monotonic() + 30.0
        while True:
            try:
                self.control = AsyncListener(self.context, self.endpoint, self.keys)
                break
            except zmq.ZMQError:  # ZeroMQ closes in a thread of its own
                assert time.monotonic() < end
                time.sleep(0.001)
        self.tasks.append(asyncio.get_running_loop().create_task(self._hear()))

    def address(self) -> Address:
        return Address(self.name, self.epoch, self.endpoint, self.keys.public)

    def register(self) -> Register:
        self.progress += self.moving
        said = {"progress": self.progress, "queued": 0, "running": len(self.active), "local_prefill": True}
        return Register(self.role, self.address(), self.fingerprint, self.limits, **(said | self.reported))

    async def _beat(self) -> None:
        while True:
            if not self.silent:
                self.registration.send(self.register())
            await asyncio.sleep(0.05)

    async def _welcomed(self) -> None:
        while True:
            for message in await self.registration.receive():
                assert isinstance(message, Registered)
                self.router_epochs.add(message.router_epoch)
                self.told_limits.append(message.limit)

    async def _hear(self) -> None:
        while True:
            for received in await self.control.receive():
                match received.message:
                    case Start(rid=rid, probe=True):
                        if self.passes is not None:
                            outcome = ("length", 200, "") if self.passes else ("failed", 500, "the engine broke")
                            self.control.send(received.sender, Ended(rid, *outcome))
                    case Start() as start:
                        self.starts[start.rid] = start
                        self.active[start.rid] = received.sender
                        self.routers.append(received.sender)
                        self.counts[start.rid] = 0
                        if self.on_start is not None:
                            self.on_start(self, start)
                        elif not self.hold:
                            self.answer(start)
                    case Cancel() as cancel:
                        self.cancels.append(cancel)
                        if cancel.rid in self.active and not self.deaf:
                            self.end(cancel.rid, "cancelled", 499, cancel.reason)
                    case Inspect(seq=seq, page=page):
                        state = {"pages": {"free": 7}} if page is None else {"page": page, "entries": []}
                        self.control.send(received.sender, Inspected(seq, self.samples, state))

    def answer(self, start: Start) -> None:
        if self.role != "decode" or start.local:
            self.tell_prompt(start)
        if self.role == "prefill":
            self.end(start.rid, "handed_over")
            return
        ids = tuple(self.reply(start))[: start.sampling.max_tokens]
        for id in ids[start.resumed :]:  # the others were given by the worker before
            self.tokens(start.rid, id)
        self.end(start.rid, "length" if len(ids) == start.sampling.max_tokens else "stop")

    def tokens(self, rid: str, *ids: int) -> None:
        self.counts[rid] += len(ids)
        top = self.starts[rid].sampling.logprobs
        logprobs = () if top is None else tuple(logprob_of(id, top) for id in ids)
        assert self.control.send(self.active[rid], Tokens(rid, ids, logprobs))

    def tell_prompt(self, start: Start, piece: int = 5) -> None:
        """The prompt's log-probabilities, `piece` in a message."""
        top = start.sampling.prompt_logprobs
        if top is None:
            return
        found = [None, *(logprob_of(id, top) for id in start.token_ids[1:])]
        for first in range(0, len(found), piece):
            message = PromptLogprobs(start.rid, first, tuple(found[first : first + piece]))
            assert self.control.send(self.active[start.rid], message)

    def end(self, rid: str, outcome: str, status: int = 200, reason: str = "", fault: str = "") -> None:
        router = self.active.pop(rid)
        prompt = len(self.starts[rid].token_ids)
        count = self.counts[rid]
        ended = Ended(rid, outcome, status, reason, prompt, count, self.cached_tokens, fault)
        assert self.control.send(router, ended)


def logprob_of(id: int, top: int) -> TokenLogprob:
    """What the fakes say of a token: its own is the second best, its successors follow."""
    found = ((id + 1, -0.25 - id / 1024), (id, -0.5 - id / 1024), *((id + k, -1.0 * k) for k in range(2, 20)))
    return TokenLogprob(found[1][1], found[:top])


@dataclass
class Cluster:
    router: Router
    workers: list[FakeWorker]
    supervisor: AsyncLink
    client: httpx.AsyncClient
    add: Callable[..., Awaitable[FakeWorker]]
    folder: Path

    def worker(self, name: str) -> FakeWorker:
        return next(worker for worker in reversed(self.workers) if worker.name == name)

    @property
    def prefill(self) -> FakeWorker:
        return self.worker("prefill-0")

    @property
    def decode(self) -> FakeWorker:
        return self.worker("decode-0")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    def exited(self, worker: FakeWorker) -> None:
        assert self.supervisor.send(Exited(worker.name, worker.epoch))

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body(**fields))

    async def heard(self, legs: int) -> None:
        """Prefill and decode have so many legs: decode may answer before prefill has heard of its own."""
        for role in ("prefill", "decode"):
            await until(lambda role=role: sum(len(w.starts) for w in self.workers if w.role == role) >= legs)

    async def idle(self) -> None:
        """No leg is outstanding anywhere, no request is being served."""
        await until(lambda: not self.router.dispatcher._calls)
        await until(lambda: not self.router.front.inflight)
        assert all(not worker.legs for worker in self.router.dispatcher.registry.workers.values())

    async def usable(self) -> None:
        await until(lambda: self.router.dispatcher.context_limit() is not None)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


def make_keys(folder: Path, names: Sequence[str]) -> None:
    ring = KeyRing(folder / "ring")
    for name in names:
        keys = KeyPair.generate()
        keys.save(folder / f"{name}.key")
        ring.add(name, keys.public)


@asynccontextmanager
async def cluster(
    folder: Path,
    text: TextModel,
    workers: Sequence[dict[str, Any]] = ({"role": "prefill"}, {"role": "decode"}),
    patience: Patience | None = None,
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{role}-{i}" for role in ("prefill", "decode", "colocated") for i in range(3)]
    make_keys(folder, ["router", "supervisor", *names])
    router = Router(settings_for(folder, folder, **settings), text, patience)
    serving = asyncio.create_task(router.serve())
    router_key = KeyPair.load(folder / "router.key").public
    context: zmq.Context[Any] = zmq.Context()
    supervisor = AsyncLink(context, router.links.endpoint, router_key, KeyPair.load(folder / "supervisor.key"))
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.port}", timeout=60)

    async def add(role: str, name: str = "", **script: Any) -> FakeWorker:
        known = sum(worker.role == role for worker in made.workers)
        worker = FakeWorker(role, name or f"{role}-{known}", folder, **script)
        worker.begin(router.links.endpoint, router_key)
        made.workers.append(worker)
        return worker

    made = Cluster(router, [], supervisor, client, add, folder)
    try:
        for worker in workers:
            await add(**worker)
        if wait:
            await until(lambda: all(w.up for w in router.dispatcher.registry.workers.values()))
            await until(lambda: len(router.dispatcher.registry.workers) == len(workers))
            await until(lambda: all(w.up for w in router.dispatcher.registry.workers.values()))
            await until(lambda: supervisor.is_up)
        yield made
    finally:
        await client.aclose()
        router._server.should_exit = True
        await serving
        for worker in made.workers:
            worker.kill()
        supervisor.close()
        context.destroy(linger=0)
