"""What a process sees of the modelled NIC: a transport like any other, both sides of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quiesce.core.messages import Grant, Leg
from quiesce.core.posting import Outcome
from quiesce.lab.sim.nic import ATTACH, DIES, Conn, Flight, Nic, Record
from quiesce.transfer.interface import Access, Capabilities, FenceProof, Peer, PeerLost, Post, Region, Transport


class SimTransport(Transport):
    """As `transfer.interface.Transport`, for one process, both sides of it."""

    def __init__(self, nic: Nic, party: Any) -> None:
        self.nic = nic
        self.party = party
        kind = nic.world.fencing
        self.caps = Capabilities(
            "sim", True, True, True, False, False, False, False, "flush" if nic.world.drains else "none",
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
        if kind == "none":
            return None
        if peer_epoch in self.conns and generation is not None:
            return self._fence_own(peer_epoch, generation, pages)
        if record is None:
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

    def _fence_own(self, peer: int, wanted: int, pages: frozenset[int] | None) -> FenceProof | None:
        """Our own reads from it: nothing of them lands any more."""
        conn, nic = self.conns[peer], self.nic
        if nic.world.fencing == "death":
            if not any(upto >= wanted for upto, _ in conn.barred):
                nic.loop.after(DIES * (0.5 + nic.rng.random()), self._end_own_mover, conn, wanted)
                return None
            return FenceProof("fenced", peer, wanted)
        conn.barred.append((wanted, pages))
        for flight in list(conn.flights):
            if nic.refused(flight):
                nic.loop.after(0.001, nic.finish, flight, Outcome.FAILED_CLEAN)
        return FenceProof("fenced", peer, wanted, pages)

    def _end_own_mover(self, conn: Conn, wanted: int) -> None:
        self.nic.kill_mover(self.party.epoch, "mover was ended")
        conn.barred.append((wanted, None))

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
        if conn is None or (conn.closed and not conn.flights):
            self._number += 1
            conn = self.conns[lender] = Conn(self.party, lender, Peer(lender, self._number))
        self.nic.loop.after(ATTACH * (0.5 + self.nic.rng.random()), self.nic.attach, conn)
        return conn.peer

    def disconnect(self, peer: Peer) -> None:
        conn = self.conns.get(peer.epoch)
        if conn is not None:
            conn.closed = True

    def read(self, peer: Peer, target: Sequence[int], source: Sequence[int], grant: Grant) -> Post:
        return self._make(peer, source, target, grant, read=True)

    def write(self, peer: Peer, source: Sequence[int], target: Sequence[int], grant: Grant) -> Post:
        return self._make(peer, source, target, grant, read=False)

    def _make(self, peer: Peer, source: Sequence[int], target: Sequence[int], grant: Grant, read: bool) -> Post:
        self._number += 1
        post = Post(self._number, peer)
        conn = self.conns[peer.epoch]
        assert set(source if read else target) <= set(grant.pages), "a page is not in the grant"
        flight = Flight(post, self.leg, source, target, grant.generation, conn, read)
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
