"""A modelled NIC: posts queue for each connection, land page by page or late, and end in one of three outcomes.

What a real one was measured to do is what this one may do: bytes land after a reported failure, after the call
raised, after the process that posted them has died. Only what the world's kind of fence can stop is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quiesce.core.messages import Leg, TransferId
from quiesce.core.posting import Outcome
from quiesce.lab.sim.clock import Loop
from quiesce.lab.sim.engine import Memory
from quiesce.lab.sim.world import World
from quiesce.transfer.interface import Peer, PeerLost, Post

if TYPE_CHECKING:
    from quiesce.lab.sim.transport import SimTransport

ATTACH = 0.005  # seconds until a mover that starts has attached
DIES = 0.004  # until a kill has ended it
MOVER_STARTS = 0.03


class Party(Protocol):
    """A process with a NIC."""

    name: str
    epoch: int
    alive: bool
    memory: Memory
    owners: dict[int, TransferId]

    def wake(self) -> None: ...
    def lends(self, leg: Leg) -> bool:
        """An open write lease covers this leg."""


@dataclass(eq=False, slots=True)
class Flight:
    """One post. `loose`: its outcome was told, and its bytes may land all the same."""

    post: Post
    leg: Leg
    source: Sequence[int]
    target: Sequence[int]
    generation: int
    conn: Conn
    read: bool = False
    landed: int = 0  # halves of pages
    over: bool = False  # nothing more of it lands
    told: bool = False  # its outcome
    loose: bool = False
    copy: list[tuple[int | None, int | None]] | None = None  # what was in the source when its process died


@dataclass(eq=False, slots=True)
class Conn:
    """From one process that posts to the one whose memory it touches: decode in push, prefill in pull."""

    owner: Any
    lender: int
    peer: Peer
    attached: bool = False
    free_at: float = 0.0  # when the queue is empty
    flights: dict[Flight, None] = field(default_factory=dict)
    closed: bool = False
    barred: list[tuple[int, frozenset[int] | None]] = field(
        default_factory=list
    )  # reads that we have fenced ourselves


@dataclass(eq=False, slots=True)
class Record:
    """What a lender knows of one poster."""

    generation: int = 0
    dead_through: int = 0
    attached: bool = False
    refusing_until: float = -1.0
    grants: dict[int, set[int]] = field(default_factory=dict)  # by generation, where pages are checked


class Nic:
    """Every NIC of the cluster. `damage(kind, flight, page)` hears of every byte that lands where it must not, and
    says whether that breaks a rule."""

    def __init__(
        self, loop: Loop, world: World, rng: random.Random, damage: Callable[[str, Flight, int], bool]
    ) -> None:
        self.loop = loop
        self.world = world
        self.rng = rng
        self.damage = damage
        self.parties: dict[int, Any] = {}  # by epoch, the living and the dead
        self.transports: dict[int, SimTransport] = {}
        self.flying: dict[Leg, int] = {}  # posts of a leg that may still land
        self.landings = 0
        self.said: Callable[..., None] | None = None  # for the story

    # ------------------------------------------------------------ movers

    def attach(self, conn: Conn) -> None:
        owner, lender = conn.owner, self.transports.get(conn.lender)
        if conn.closed or not owner.alive or lender is None or conn.attached:
            return
        if not lender.party.alive or not self.transports[owner.epoch].mover:
            return
        conn.attached = True
        record = lender.records.setdefault(owner.epoch, Record())
        lender.newest += 1
        record.generation, record.attached = lender.newest, True
        lender.party.wake()

    def kill_mover(self, epoch: int, why: str) -> None:
        """Nothing that it had not placed will land; all of that ends clean."""
        transport = self.transports.get(epoch)
        if transport is None or not transport.mover:
            return
        transport.mover = False
        for conn in transport.conns.values():
            conn.attached = False
            for flight in list(conn.flights):
                self.finish(flight, Outcome.FAILED_CLEAN)
        for lender in self.transports.values():
            record = lender.records.get(epoch)
            if record is not None and record.generation > record.dead_through:
                record.dead_through, record.attached = record.generation, False
                lender.lost.append(PeerLost(epoch, record.generation, why, not transport.party.alive))
                lender.party.wake()
        if transport.party.alive:
            self.loop.after(MOVER_STARTS * (0.5 + self.rng.random()), self._start_mover, transport)

    def _start_mover(self, transport: SimTransport) -> None:
        if transport.party.alive and not transport.mover:
            transport.mover = True
            for conn in transport.conns.values():
                self.loop.after(ATTACH * (0.5 + self.rng.random()), self.attach, conn)

    # ------------------------------------------------------------ a process dies

    def died(self, epoch: int) -> None:
        transport = self.transports[epoch]
        for conn in transport.conns.values():
            for flight in conn.flights:
                if flight.read:
                    continue  # answers land only in the process that asked
                left, right = transport.party.memory.left, transport.party.memory.right
                flight.copy = [(left[page], right[page]) for page in flight.source]
        if self.world.fencing == "death":
            self.loop.after(DIES * (0.5 + self.rng.random()), self.kill_mover, epoch, "mover died")
        elif self.world.direction == "pull":
            self.loop.after(DIES * (0.5 + self.rng.random()), self._reader_died, epoch)
        for other in self.transports.values():
            target = other.conns.get(epoch)
            if target is not None and not target.closed and other.party.alive:
                self.loop.after(DIES * (0.5 + self.rng.random()), self._lender_died, other, target)

    def _reader_died(self, epoch: int) -> None:
        for lender in self.transports.values():
            if epoch in lender.records:
                lender.lost.append(PeerLost(epoch, lender.records[epoch].generation, "its engine died", True))
                lender.party.wake()

    def _lender_died(self, transport: SimTransport, conn: Conn) -> None:
        """Placement is bound to the lender's process: what was under way lands nowhere."""
        for flight in list(conn.flights):
            self.finish(flight, Outcome.FAILED_CLEAN)
        conn.closed, conn.attached = True, False
        transport.lost.append(PeerLost(conn.lender, 0, "the lender died", True))
        transport.party.wake()

    # ------------------------------------------------------------ posts

    def launch(self, flight: Flight) -> None:
        """Decides when it lands and what is said of it."""
        noise, rng, loop, conn = self.world.noise, self.rng, self.loop, flight.conn
        conn.flights[flight] = None
        self.flying[flight.leg] = self.flying.get(flight.leg, 0) + 1
        takes = self.world.post_seconds + self.world.page_seconds * len(flight.source)
        if noise.slow and rng.random() < noise.slow:
            takes += rng.expovariate(1.0) * self.world.hold_timeout
        done = conn.free_at = max(conn.free_at, loop.now) + takes
        fate = rng.random()
        self._say("posted", flight)
        if fate < noise.raised:
            flight.loose = flight.told = True
            self._say("raised", flight)
            self._late(flight, done)
            raise ConnectionError("the transfer engine lost its handle")
        fate -= noise.raised
        if fate < noise.unknown:
            loop.at(done, self.tell, flight, Outcome.UNKNOWN)
            self._late(flight, done)
        elif fate < noise.unknown + noise.failed:
            loop.at(done - takes / 2, self.land, flight, rng.randrange(2 * len(flight.source) + 1))
            loop.at(done, self.finish, flight, Outcome.FAILED_CLEAN)
        else:
            loop.at(done, self._placed, flight)

    def _late(self, flight: Flight, told: float) -> None:
        """It lands whenever it likes, in two parts, all of it or some, behind what was posted after it."""
        rng, halves = self.rng, 2 * len(flight.source)
        first = rng.uniform(self.loop.now, told) if rng.random() < 0.5 else told
        self.loop.at(first, self.land, flight, rng.randrange(halves + 1))
        after = told + rng.random() ** 2 * 3 * self.world.hold_timeout
        self.loop.at(after, self._landed_late, flight, rng.choice((halves, rng.randrange(halves + 1))))

    def _landed_late(self, flight: Flight, upto: int) -> None:
        self.land(flight, upto)
        self._over(flight)

    def _placed(self, flight: Flight) -> None:
        if flight.over:
            return
        if self.refused(flight):
            self.finish(flight, Outcome.FAILED_CLEAN)
            return
        self.land(flight, 2 * len(flight.source))
        self.finish(flight, Outcome.PLACED)

    def refused(self, flight: Flight) -> bool:
        """At the target, by its generation and, where pages are checked, by its grant."""
        lender = self.transports[flight.conn.lender]
        record = lender.records.get(flight.conn.owner.epoch)
        if flight.read and self._barred(flight):
            return True
        if not lender.party.alive or record is None or flight.generation <= record.dead_through:
            return True
        return self.world.fencing == "page" and not record.grants.get(flight.generation, set()).issuperset(
            flight.source if flight.read else flight.target
        )

    def _barred(self, flight: Flight) -> bool:
        if not flight.conn.owner.alive:
            return True
        return any(
            flight.generation <= upto and (pages is None or not pages.isdisjoint(flight.target))
            for upto, pages in flight.conn.barred
        )

    def finish(self, flight: Flight, outcome: Outcome) -> None:
        self._over(flight)
        self.tell(flight, outcome)

    def _over(self, flight: Flight) -> None:
        if not flight.over:
            flight.over = True
            flight.conn.flights.pop(flight, None)
            self._landing_ends(flight)

    def _say(self, what: str, flight: Flight, detail: Any = None) -> None:
        if self.said is not None:
            self.said(what, flight, detail)

    def _landing_ends(self, flight: Flight) -> None:
        self.flying[flight.leg] -= 1
        if not self.flying[flight.leg]:
            del self.flying[flight.leg]

    def tell(self, flight: Flight, outcome: Outcome) -> None:
        if flight.told:
            return
        flight.told = True
        self._say("told", flight, outcome)
        flight.loose = outcome is Outcome.UNKNOWN
        owner = flight.conn.owner
        if owner.alive:
            self.transports[owner.epoch].ended.append((flight.post, outcome))
            owner.wake()

    def may_land(self, leg: Leg) -> bool:
        """Bytes of this leg may still reach, or be taken from, pages that are lent to it."""
        if leg not in self.flying:
            return False
        transport = self.transports[leg.tid.epoch if self.world.direction == "pull" else leg.p_epoch]
        return any(
            flight.leg == leg and not self.refused(flight)
            for conn in transport.conns.values()
            for flight in conn.flights
        )

    def land(self, flight: Flight, upto: int) -> None:
        """Halves of pages up to `upto` are written, out of what the source holds at this moment."""
        if flight.over or upto <= flight.landed or self.refused(flight):
            return
        lender, sender = self.transports[flight.conn.lender].party, flight.conn.owner
        if flight.read:
            lender, sender = sender, lender
        tid = flight.leg.tid
        self.landings += 1
        self._say("lands", flight)
        if not lender.lends(flight.leg):
            page = flight.target[flight.landed // 2]
            self.damage("land", flight, page)
        for half in range(flight.landed, upto):
            place = half // 2
            page, source = flight.target[place], flight.source[place]
            if lender.owners.get(page) != tid and self.damage("land", flight, page):
                return
            if flight.copy is not None:
                tag = flight.copy[place][half % 2]
            else:
                if sender.owners.get(source) != tid and self.damage("leak", flight, source):
                    return
                tag = (sender.memory.right if half % 2 else sender.memory.left)[source]
            (lender.memory.right if half % 2 else lender.memory.left)[page] = tag
        flight.landed = upto
