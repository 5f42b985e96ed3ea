"""The real router's dispatcher, registry and request machines on the virtual clock, and their clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quiesce.api.backend import Ask
from quiesce.api.errors import ApiError
from quiesce.channel.frames import LinkEvent
from quiesce.core.messages import Sampling, Wire
from quiesce.lab.sim.clock import LocalClock, Loop
from quiesce.lab.sim.edges import REGISTRY
from quiesce.lab.sim.engine import token_of
from quiesce.lab.sim.network import Network, Owner, SimKeys, SimLink, SimListener
from quiesce.lab.sim.world import Req
from quiesce.router.calls import Call
from quiesce.router.dispatch import SWEEP_SECONDS, Dispatcher
from quiesce.router.registry import Patience, Registry, Worker

TICK = 0.0002


class Handle:
    """As asyncio's timer handles."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class RouterLoop:
    """What the dispatcher asks of its event loop."""

    def __init__(self, loop: Loop, clock: LocalClock, run: Callable[..., None]) -> None:
        self._loop = loop
        self._clock = clock
        self._run = run

    def time(self) -> float:
        return self._clock.monotonic()

    def call_at(self, when: float, call: Callable[..., Any], *arguments: Any) -> Handle:
        handle = Handle()
        self._loop.at(self._clock.true(when), self._fire, handle, call, arguments)
        return handle

    def call_later(self, delay: float, call: Callable[..., Any], *arguments: Any) -> Handle:
        return self.call_at(self.time() + delay, call, *arguments)

    def _fire(self, handle: Handle, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if not handle.cancelled:
            self._run(call, *arguments)

    def create_task(self, task: Any, name: str = "") -> None:
        task.close()  # the sweep: the simulator calls it itself


@dataclass(eq=False)
class Answer:
    """What one client got for one sample, and what it should have got."""

    req: Req
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    verdicts: int = 0
    verdict: bool = False


@dataclass(eq=False)
class Client:
    req: Req
    answers: list[Answer]
    work: Any = None
    left: bool = False


class SimRouter(Owner):
    """`broken(rule)`: a client was told twice, or told what no model said."""

    name = REGISTRY
    epoch = 0
    alive = True

    def __init__(
        self, loop: Loop, net: Network, clock: LocalClock, hold: float, broken: Callable[[str], None]
    ) -> None:
        self.loop = loop
        self.net = net
        self.clock = clock
        self.hold = hold
        self.broken = broken
        self.asyncio = RouterLoop(loop, clock, self._run)
        self.clients: list[Client] = []
        self.open: dict[int, Client] = {}
        self.outcomes: Counter[str] = Counter()
        self.links: dict[int, tuple[SimLink, Worker]] = {}
        self._woken = False
        self._changed: list[tuple[Client, Call]] = []
        self.active: Callable[[Owner], None]
        self.dispatcher: Dispatcher

    def start(self) -> None:
        """Inside the edges."""
        self.net.owner = self
        self.listener = SimListener(self.net, REGISTRY, SimKeys(REGISTRY))
        self.dispatcher = Dispatcher(Registry(Patience.for_hold_timeout(self.hold)))
        self.dispatcher.start(self)  # type: ignore[arg-type]
        self.loop.after(SWEEP_SECONDS, self._sweep)

    # ------------------------------------------------------------ as `router.links.Links`

    def connect(self, worker: Worker) -> None:
        self.net.owner = self
        self.links[worker.epoch] = (SimLink(self.net, worker.latest.address.endpoint, False), worker)

    def send(self, worker: Worker, message: Wire) -> bool:
        entry = self.links.get(worker.epoch)
        return entry is not None and entry[0].send(message)

    def disconnect(self, worker: Worker) -> None:
        entry = self.links.pop(worker.epoch, None)
        if entry is not None:
            entry[0].close()

    # ------------------------------------------------------------ its loop

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.loop.after(TICK, self._turn)

    def _turn(self) -> None:
        self._woken = False
        self._run(self._hear)

    def _hear(self) -> None:
        for received in self.listener.receive():
            answer = self.dispatcher.from_registry(received)
            if answer is not None:
                self.listener.send(received.sender, answer)
        for link, worker in list(self.links.values()):
            for event in link.state_changes():
                self.dispatcher.link_changed(worker, event is LinkEvent.UP)
            for message in link.receive():
                self.dispatcher.from_worker(worker, message)

    def _sweep(self) -> None:
        self.loop.after(SWEEP_SECONDS, self._sweep)
        self._run(lambda: self.dispatcher._apply(self.dispatcher.registry.sweep(self.asyncio.time())))

    def _run(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.active(self)
        call(*arguments)
        while self._changed:
            self._collect(*self._changed.pop())

    # ------------------------------------------------------------ clients

    def ask(self, req: Req, page_size: int) -> None:
        prompt = req.tokens(page_size)
        expected = [token_of(prompt[-1], index) for index in range(req.answer)]
        client = Client(req, [Answer(req, expected) for _ in range(req.samples)])
        self.clients.append(client)
        sampling = Sampling(max_tokens=req.most, stop_token_ids=(expected[-1],))
        asks = [
            Ask(
                rid=f"r{req.number}" + (f".{index}" if req.samples > 1 else ""),
                label="",
                token_ids=prompt,
                sampling=sampling,
                deadline=self.asyncio.time() + req.timeout,
                group=f"g{req.number}" if req.samples > 1 else "",
            )
            for index in range(req.samples)
        ]
        self._run(self._open, client, asks)
        if req.abort_at is not None:
            self.loop.at(req.abort_at, self.leave, client)

    def _open(self, client: Client, asks: list[Ask]) -> None:
        limit = self.dispatcher.context_limit()
        refused = limit is not None and len(asks[0].token_ids) + client.req.most > limit
        try:
            if refused:
                raise ApiError(400, "longer than the limit")
            client.work = self.dispatcher.open(asks)
        except ApiError as error:
            self.outcomes[str(error.status)] += len(client.answers)
            for answer in client.answers:
                answer.verdicts += 1
            return
        self.open[client.req.number] = client
        self._changed += [(client, call) for call in client.work._changed.values()]
        client.work.changed = lambda call: self._changed.append((client, call)) if call.ready else None

    def _collect(self, client: Client, call: Call) -> None:
        delivery = call.take()
        answer = client.answers[delivery.index]
        answer.tokens += delivery.token_ids
        if answer.tokens != answer.expected[: len(answer.tokens)]:
            self.broken("a client reads the answer to its own prompt, no token twice and none left out")
        if delivery.verdict is not None and not answer.verdict:
            answer.verdict = True
            self._verdict(answer, delivery.verdict)
        if all(answer.verdicts for answer in client.answers):
            self.open.pop(client.req.number, None)

    def _verdict(self, answer: Answer, verdict: Any) -> None:
        answer.verdicts += 1
        if answer.verdicts > 1:
            self.broken("every request ends exactly once")
        if verdict.error is not None:
            self.outcomes[str(verdict.error.status)] += 1
        else:
            self.outcomes["answered"] += 1
            if answer.tokens != answer.expected:
                self.broken("an answer that ends well is whole")

    def leave(self, client: Client) -> None:
        """The client is gone: nobody reads what follows."""
        if client.req.number in self.open and not client.left:
            client.left = True
            self._run(client.work.abandon, "the client is gone")

    def storm(self) -> None:
        """Every client leaves at once."""
        for client in list(self.open.values()):
            self.leave(client)
