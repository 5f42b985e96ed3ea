"""The cluster of one world: its processes, what befalls them, and what must hold meanwhile and at the end."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quiesce.core.lending import Transfer
from quiesce.core.messages import Exited, TransferId
from quiesce.lab.sim.clock import LocalClock, Loop, SimTime
from quiesce.lab.sim.edges import Faults
from quiesce.lab.sim.gauge import Gauge
from quiesce.lab.sim.network import Network
from quiesce.lab.sim.nic import Flight, Nic
from quiesce.lab.sim.process import Process
from quiesce.lab.sim.router import SimRouter
from quiesce.lab.sim.world import Fault, Noise, World

BLAMELESS = ("answered", "400", "499", "503", "504")  # refused, gone, overloaded, late
STARTS = 0.5  # seconds that a process needs to start again
FULL_CHECK = 997  # turns between two looks at every page


@dataclass(frozen=True)
class Broken:
    """The first rule that did not hold."""

    rule: str
    at: float
    who: str = ""
    tid: TransferId | None = None
    other: TransferId | None = None  # whose page it was
    page: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = f" (page {self.page})" if self.page is not None else ""
        return f"{self.rule}: {self.who}{where} at {self.at:.3f} s {self.detail}".rstrip()


class Cluster:
    """`strict`: what is not safe is reported before it does damage; without it only damage is."""

    def __init__(self, world: World, strict: bool = True) -> None:
        self.world = world
        self.strict = strict
        self.loop = Loop()
        rng = random.Random(world.seed * 2 + 1)
        self.rng = rng
        self.engine_rng = random.Random(rng.random())
        self.chance = random.Random(rng.random())
        self.net = Network(self.loop, random.Random(rng.random()), world.noise)
        self.nic = Nic(self.loop, world, random.Random(rng.random()), self._damage)
        self.clocks = {name: self._clock() for name in [*world.workers, "router"]}
        self.time = SimTime(self.clocks["router"])
        self.faults = Faults()
        self.waits: list[float] = []  # from a leg's arrival at decode to its pages
        self.first_broken: Broken | None = None
        self.processes: dict[str, Process] = {}
        self.graves: list[Process] = []
        self.restarts: dict[str, int] = {}
        self.exits = 0
        self.held, self.owned = Gauge(), Gauge()  # pages of all decode workers
        self.told: Callable[..., None] | None = None  # for the story
        self.router = SimRouter(
            self.loop,
            self.net,
            self.clocks["router"],
            world.hold_timeout,
            lambda rule: self.broken(rule, self.router),
        )
        self.router.active = self.active

    def _clock(self) -> LocalClock:
        skew = self.world.skew
        return LocalClock(self.loop, 1.0 + self.rng.uniform(-skew, skew), self.rng.uniform(0, 1e6))

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Inside the edges."""
        self.router.start()
        for name in self.world.workers:
            self.spawn(name)
        for req in self.world.requests:
            self.loop.at(req.at, self.router.ask, req, self.world.page_size)
        for fault in self.world.faults:
            self.loop.at(fault.at, self.befall, fault)

    def active(self, process: Any) -> None:
        """Its clock is the one that the product reads now."""
        self.time.current = process.clock

    def spawn(self, name: str) -> None:
        life = self.restarts[name] = self.restarts.get(name, 0) + 1
        epoch = self.rng.getrandbits(60) << 4 | 1
        process = Process(self, name, epoch, self.clocks[name])
        endpoint = name if self.world.same_address else f"{name}#{life}"
        listener = process.worker.listener
        del self.net.listeners[listener.endpoint]
        listener.endpoint = endpoint
        self.net.listeners[endpoint] = listener
        self.processes[name] = process
        self.tell("starts", process)

    def exited(self, process: Process) -> None:
        """It drained: too much was retained, and a new process with new memory is the fence."""
        self.exits += 1
        self.tell("drains", process)
        process.worker.legs.flush(process.clock.monotonic())
        self.crash(process.name)

    def crash(self, name: str) -> None:
        process = self.processes.get(name)
        if process is None or not process.alive:
            return
        self.tell("dies", process)
        process.die()
        self.graves.append(process)
        delay = STARTS * (0.5 + self.rng.random())
        self.loop.after(delay, self.spawn, name)
        if self.world.supervised:
            self.loop.after(delay / 2, self._reaped, process)

    def _reaped(self, process: Process) -> None:
        self.router._run(self._say_exited, process)

    def _say_exited(self, process: Process) -> None:
        dispatcher = self.router.dispatcher
        message = Exited(process.name, process.epoch)
        dispatcher._apply(dispatcher.registry.on_exited(message, "supervisor", self.router.clock.monotonic()))

    def measure(self) -> None:
        held = owned = 0
        for process in self.processes.values():
            if process.alive and not process.prefill:
                census = process.worker.ledger.census()
                held += census.held + census.retained
                owned += census.owned
        self.held.set(held, self.loop.now)
        self.owned.set(owned, self.loop.now)

    # ------------------------------------------------------------ what befalls it

    def befall(self, fault: Fault) -> None:
        match fault.kind:
            case "crash":
                self.crash(fault.who[0])
            case "pause":
                self.tell("stops", self.processes[fault.who[0]], fault.seconds)
                self.processes[fault.who[0]].pause(fault.seconds)
            case "partition":
                self.tell("cut", None, fault)
                self.net.partition(fault.who[0], fault.who[1], self.loop.now + fault.seconds)
            case "storm":
                self.tell("storm", None)
                self.router.storm()
            case "stall":
                self.tell("stall", self.processes[fault.who[0]], fault.seconds)
                for conn in self.processes[fault.who[0]].transport.conns.values():
                    conn.free_at = max(conn.free_at, self.loop.now) + fault.seconds
            case "mover":
                if self.world.fencing == "death":
                    self.tell("mover", self.processes[fault.who[0]])
                    self.nic.kill_mover(self.processes[fault.who[0]].epoch, "mover died")

    def tell(self, what: str, process: Any, *more: Any) -> None:
        if self.told is not None:
            self.told(what, process, *more)

    # ------------------------------------------------------------ what must hold

    def broken(
        self,
        rule: str,
        who: Any,
        tid: TransferId | None = None,
        other: TransferId | None = None,
        page: int | None = None,
        detail: str = "",
    ) -> None:
        if self.first_broken is None:
            self.first_broken = Broken(rule, self.loop.now, who.name, tid, other, page, detail)

    def raised(self, error: Exception, who: Any) -> None:
        """A fault of the product, or of what is modelled around it: the seed has failed either way."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.broken("no machine raises", who, detail=f"{error!r} in {place.name}, {place.filename}:{place.lineno}")

    def _damage(self, kind: str, flight: Flight, page: int) -> bool:
        """A byte goes where it must not. Into or out of a page that is free it is no damage yet, only about to be."""
        tid = flight.leg.tid
        place, source = self.nic.transports[flight.conn.lender].party, flight.conn.owner
        if flight.read:
            place, source = source, place
        if kind == "leak":
            place, rule = source, "no post takes bytes of another request's source page"
        elif place.owners.get(page) == tid:
            rule = "no byte lands under a lease that is closed"
        else:
            rule = "no byte of a transfer lands in a page that another owns"
        other = place.owners.get(page)
        if other in (None, tid) and not self.strict:
            return False
        self.broken(rule, place, tid, None if other == tid else other, page)
        return True

    # ------------------------------------------------------------ the end

    def give_up(self) -> None:
        """It should have been over by now."""
        tid = next((t.tid for p in self.processes.values() if not p.prefill for t in provable(p)), None)
        for process in self.processes.values():
            if tid is None and process.alive:
                tid = next(iter(process.shadow.sizes), None)
        detail = "; ".join(self.unsettled()[:5])
        self.broken("everything ends, and every page comes back", self.router, tid, detail=detail)

    def quiet(self) -> bool:
        """Nothing is asked, running or held any more."""
        if self.router.open or any(client.req.at > self.loop.now for client in self.router.clients):
            return False
        return len(self.router.clients) == len(self.world.requests) and not self.unsettled()

    def judge(self) -> None:
        """Where nothing went wrong, nobody may be told that something did."""
        world = self.world
        if world.faults or world.noise != Noise(delay=world.noise.delay, ordered=world.noise.ordered):
            return
        failed = {status: n for status, n in self.router.outcomes.items() if status not in BLAMELESS}
        if failed:
            self.broken("without a fault nothing fails", self.router, detail=str(failed))

    def unsettled(self) -> list[str]:
        """What is not as it must be at the end, a line each. Retained pages are reported, not unsettled."""
        lines = []
        if len(self.processes) < len(self.world.workers):
            lines.append("a worker has not come back")
        for process in self.processes.values():
            if not process.alive:
                lines.append(f"{process.name} is down")
                continue
            lines += [f"{process.name}: {line}" for line in left(process)]
        for client in self.router.clients:
            for answer in client.answers:
                if not answer.verdicts:
                    lines.append(f"request {client.req.number} has not ended")
        if self.router.dispatcher._calls:
            lines.append(f"the router still knows {len(self.router.dispatcher._calls)} requests")
        return lines


def left(process: Process) -> list[str]:
    """What one worker still has to do."""
    worker = process.worker
    census = worker.ledger.census()
    lines = []
    if census.free + census.retained != census.total:
        lines.append(f"{census.owned} pages owned, {census.held} held")
    for name, table in (("legs", worker.legs), ("batch", worker.batch), ("outbox", worker.legs.outbox)):
        if len(table):
            lines.append(f"{len(table)} in {name}")
    if process.prefill:
        records = process.under_way()
        if records or worker.queue or worker.by_leg or worker.jobs or worker.by_tid:
            lines.append(f"{records} transfers, {len(worker.queue)} queued, {len(worker.by_leg)} offers")
    else:
        lines += [f"{t.tid} is held, and a proof was to be had" for t in provable(process)]
        generation = worker.generation
        if (
            worker.waiting
            or generation.by_tid
            or generation.sequences
            or generation.retracted
            or len(worker.revoking)
        ):
            lines.append(
                f"{len(worker.waiting)} waiting, {len(generation.by_tid)} admitted, {len(worker.revoking)} fences"
            )
        if generation.promises.promised:
            lines.append(f"{generation.promises.promised} pages promised to nobody")
    return lines


def provable(process: Process) -> list[Transfer]:
    """Holds of a decode worker for which there is a proof: a fence, or a peer that lives and has nothing in doubt."""
    found, world = [], process.cluster.world
    for transfer in process.worker.lender.transfers.values():
        for peer in transfer.published.values():
            leg = peer.offer.leg
            prefill = process.cluster.nic.parties.get(leg.p_epoch)
            if peer.proven:
                continue
            if world.direction == "pull":
                excused = peer.tainted and not world.drains
            elif prefill is None or not prefill.alive:
                excused = prefill is not None
            else:
                record = prefill.worker.borrower.record(leg)
                excused = record is not None and record.tainted and not world.drains
            if world.fencing != "none" or not excused:
                found.append(transfer)
    return found
