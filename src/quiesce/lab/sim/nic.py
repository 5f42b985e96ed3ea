"""A modelled NIC: posts queue for each connection, land page by page or late, and end in one of three outcomes.

What a real one was measured to do is what this one may do: bytes land after a reported failure, after the call
raised, after the process that posted them has died. Only what the world's kind of fence can stop is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quiesce.core.messages import Grant, Leg, TransferId
from quiesce.core.posting import Outcome
from quiesce.lab.sim.clock import Loop
from quiesce.lab.sim.engine import Memory
from quiesce.lab.sim.world import World
from quiesce.transfer.interface import Access, Capabilities, FenceProof, Peer, PeerLost, Post, Region, Transport

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
    landed: int = 0  # halves of pages
    over: bool = False  # nothing more of it lands
    told: bool = False  # its outcome
    loose: bool = False
    copy: list[tuple[int | None, int | None]] | None = None  # what was in the source when its process died


@dataclass(eq=False, slots=True)
class Conn:
    """From one prefill process to one lender."""

    owner: Any
    lender: int
    peer: Peer
    attached: bool = False
    free_at: float = 0.0  # when the queue is empty
    flights: dict[Flight, None] = field(default_factory=dict)
    closed: bool = False


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
                lender.lost.append(PeerLost(epoch, record.generation, why, True))
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
                left, right = transport.party.memory.left, transport.party.memory.right
                flight.copy = [(left[page], right[page]) for page in flight.source]
        if self.world.fencing == "death":
            self.loop.after(DIES * (0.5 + self.rng.random()), self.kill_mover, epoch, "mover died")
        for other in self.transports.values():
            target = other.conns.get(epoch)
            if target is not None and not target.closed and other.party.alive:
                self.loop.after(DIES * (0.5 + self.rng.random()), self._lender_died, other, target)

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
        record = lender.records.get(flight.leg.p_epoch)
        if not lender.party.alive or record is None or flight.generation <= record.dead_through:
            return True
        return self.world.fencing == "page" and not record.grants.get(flight.generation, set()).issuperset(
            flight.target
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
        """Bytes of this leg may still reach the lender's pages."""
        if leg not in self.flying:
            return False
        transport = self.transports[leg.p_epoch]
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


class SimTransport(Transport):
    """As `transfer.interface.Transport`, for one process, both sides of it."""

    def __init__(self, nic: Nic, party: Any) -> None:
        self.nic = nic
        self.party = party
        kind = nic.world.fencing
        self.caps = Capabilities(
            "sim", True, False, True, False, False, False, False, "flush" if nic.world.drains else "none",
            kind, "disrupts_peer" if kind == "death" else "none" if kind == "none" else "us", "visible",
        )  # fmt: skip
        self.records: dict[int, Record] = {}  # lender: by poster's epoch
        self.conns: dict[int, Conn] = {}  # poster: by lender's epoch
        self.newest = 0  # generation
        self.mover = True
        self.lost: list[PeerLost] = []
        self.ended: list[tuple[Post, Outcome]] = []
        self.leg: Leg  # of the post that is made next
        self._number = 0
        nic.transports[party.epoch] = self
        nic.parties[party.epoch] = party

    def fileno(self) -> int:
        return -1

    def register(self, arena: Any) -> Region:
        return Region(1, arena.count, arena.page_bytes)

    def close_all(self) -> None:
        pass

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return b"%d" % self.party.epoch

    def consume_barrier(self, pages: Sequence[int]) -> None:
        pass

    def events(self) -> list[PeerLost]:
        found, self.lost = self.lost, []
        return found

    def poll(self) -> list[tuple[Post, Outcome]]:
        found, self.ended = self.ended, []
        return found

    # ------------------------------------------------------------ the lender's side

    def generation(self, peer_epoch: int) -> int | None:
        record = self.records.get(peer_epoch)
        return record.generation if record is not None and record.attached else None

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        record = self.records.get(peer_epoch)
        if record is None or not record.attached:
            return None
        if self.nic.world.fencing == "page":
            self.newest += 1
            record.generation = self.newest
            record.grants[record.generation] = set(pages)
        return record.generation

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        record = self.records.get(peer_epoch)
        if record is not None:
            record.grants.pop(generation, None)

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        record, nic = self.records.get(peer_epoch), self.nic
        kind = nic.world.fencing
        if record is None or kind == "none":
            return None
        wanted = record.generation if generation is None else generation
        if wanted > record.generation or (wanted > record.dead_through and self._refuses(record)):
            return None
        if kind == "page":
            for number in [number for number in record.grants if number <= wanted]:
                record.grants[number] -= record.grants[number] if pages is None else pages
            self._end_refused(peer_epoch)
            return FenceProof("fenced", peer_epoch, wanted, pages)
        if wanted > record.dead_through:
            if kind == "death":
                nic.loop.after(DIES * (0.5 + nic.rng.random()), nic.kill_mover, peer_epoch, "mover was killed")
                record.attached = False
                return None
            self._bar(peer_epoch, record, wanted)
        return FenceProof("fenced", peer_epoch, record.dead_through)

    def _refuses(self, record: Record) -> bool:
        """Some fences cannot be had for a while."""
        nic = self.nic
        if record.refusing_until < 0 and nic.rng.random() < nic.world.noise.refused_fence:
            record.refusing_until = nic.loop.now + 10 * nic.rng.random()
        return nic.loop.now < record.refusing_until

    def _bar(self, peer: int, record: Record, wanted: int) -> None:
        """At the target and at once: what is in flight and every later post under the old grants are refused."""
        record.dead_through = wanted
        if wanted == record.generation and record.attached:
            self.newest += 1
            record.generation = self.newest
        self._end_refused(peer)

    def _end_refused(self, peer: int) -> None:
        """What a fence has refused ends clean at its poster."""
        conn = self.nic.transports[peer].conns.get(self.party.epoch)
        for flight in list(conn.flights) if conn is not None else ():
            if self.nic.refused(flight):
                self.nic.loop.after(0.001, self.nic.finish, flight, Outcome.FAILED_CLEAN)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        record, kind = self.records.get(peer_epoch), self.nic.world.fencing
        if record is None or kind == "none":
            return None
        if kind == "death":
            return FenceProof("gone", peer_epoch, record.dead_through) if record.dead_through else None
        poster = self.nic.transports[peer_epoch]
        conn = poster.conns.get(self.party.epoch)
        if poster.party.alive or (conn is not None and conn.flights):
            return None
        record.attached, record.dead_through = False, record.generation
        record.grants.clear()
        return FenceProof("gone", peer_epoch, record.generation)

    # ------------------------------------------------------------ the poster's side

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        lender = int(descriptor)
        conn = self.conns.get(lender)
        if conn is None:
            self._number += 1
            conn = self.conns[lender] = Conn(self.party, lender, Peer(lender, self._number))
        self.nic.loop.after(ATTACH * (0.5 + self.nic.rng.random()), self.nic.attach, conn)
        return conn.peer

    def disconnect(self, peer: Peer) -> None:
        conn = self.conns.get(peer.epoch)
        if conn is not None:
            conn.closed = True

    def write(self, peer: Peer, source: Sequence[int], target: Sequence[int], grant: Grant) -> Post:
        self._number += 1
        post = Post(self._number, peer)
        conn = self.conns[peer.epoch]
        assert set(target) <= set(grant.pages), "a target page is not in the grant"
        flight = Flight(post, self.leg, source, target, grant.generation, conn)
        if conn.closed or not self.mover:
            self.ended.append((post, Outcome.FAILED_CLEAN))
            self.party.wake()
        else:
            self.nic.launch(flight)
        return post

    def try_cancel(self, post: Post) -> bool:
        return False

    def drain(self, peer: Peer) -> bool:
        conn = self.conns.get(peer.epoch)
        return self.nic.world.drains and (conn is None or not conn.flights)
