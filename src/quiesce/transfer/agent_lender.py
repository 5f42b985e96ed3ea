"""The lending side of engines with agents: each peer is lent one of its own, and its end is that peer's fence."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from quiesce.transfer import attach as wire
from quiesce.transfer.agent import TRIAL_BYTES, Engine
from quiesce.transfer.agent_records import Connection, PeerRecord
from quiesce.transfer.couriers import Keeper, Told
from quiesce.transfer.incoming import incoming
from quiesce.transfer.interface import Arena, FenceProof, PeerLost
from quiesce.transfer.watch import Watch, has_exited
from quiesce.transfer.window import Window

log = logging.getLogger("quiesce.transfer")

MAX_HALF_OPEN = 32
MAX_ENDED_RECORDS = 4096  # beyond it the oldest proof is forgotten: pages are then held longer, never freed
MAX_UNPROVEN = 64  # generations of one peer whose end proves nothing
MAX_LEFT = 64  # agents that cannot be ended, because their peers may still be reading through them


class AgentLender:
    """`host`: interface on which to listen for peers of other machines; None: this machine only."""

    def __init__(
        self, watch: Watch, told: Told, engine: Engine, run_dir: Path, epoch: int, host: str | None, max_peers: int
    ) -> None:
        self._watch, self._told, self._engine, self._run_dir = watch, told, engine, run_dir
        self._epoch, self._host, self._max_peers = epoch, host, max_peers
        self._secret = secrets.token_bytes(32)
        self._arena: Arena | None = None
        self._keeper: Keeper | None = None
        self._listener: socket.socket | None = None
        self._address = ""
        self._half_open: list[Connection] = []
        self._records: dict[int, PeerRecord] = {}
        self._by_generation: dict[int, Connection] = {}  # agents that are being made
        self._ending: dict[int, PeerRecord] = {}
        self._parting: set[Connection] = set()  # of readers that have let go, until their own agents have ended
        self._left = 0
        self._last_generation = 0
        self.lost: list[PeerLost] = []
        self.counters = dict.fromkeys(("attach_refused", "agents_lent", "agents_ended", "agents_rebuilt"), 0)

    def lend(self, arena: Arena) -> None:
        self._arena = arena

    def descriptor(self, peer_epoch: int) -> bytes:
        if self._arena is None:
            raise ValueError("register an arena before handing out its descriptor")
        if self._listener is None:
            self._listener, self._address = wire.listen(self._run_dir, self._host, MAX_HALF_OPEN)
            self._watch.add(self._listener.fileno(), self._accept)
            self._keeper = Keeper(self._engine, self._arena, self._told, self._made, self._ended)
        found = wire.Descriptor(
            kind=self._engine.caps.label,
            address=self._address,
            token=wire.token_for(self._secret, peer_epoch),
            epoch=self._epoch,
            region=0,
            pages=self._arena.count,
            page_bytes=self._arena.page_bytes,
        )
        return msgspec.msgpack.encode(found)

    # ------------------------------------------------------------ attaching

    def _accept(self) -> None:
        assert self._listener is not None
        for sock, _ in incoming(self._listener, MAX_HALF_OPEN, log, "a peer"):
            line = wire.Line(sock)
            pid, uid = line.credentials()
            if len(self._half_open) >= MAX_HALF_OPEN or uid not in (-1, os.getuid()):
                self.counters["attach_refused"] += 1
                log.warning("a peer is refused: it runs as user %d, or too many handshakes are unfinished", uid)
                line.close()
                continue
            deadline = time.monotonic() + wire.ATTACH_SECONDS
            connection = Connection(line, deadline, max(pid, 0), secrets.token_bytes(16))
            self._half_open.append(connection)
            self._watch.add(sock.fileno(), lambda connection=connection: self._on_packets(connection))  # type: ignore[misc]

    def _on_packets(self, connection: Connection) -> None:
        try:
            for packet in connection.line.hear():
                if connection.line.fileno() >= 0:  # not dropped by the packet before
                    self._step(connection, packet)
        except wire.Closed as error:
            self._drop(connection, str(error))
        except wire.Malformed as error:
            self.counters["attach_refused"] += 1
            log.warning("a peer broke the handshake: %s", error)
            self._drop(connection, "broke the handshake")

    def _step(self, connection: Connection, packet: wire.Packet) -> None:
        match packet:
            case wire.Greet(epoch=epoch, challenge=challenge) if not connection.their_challenge and challenge:
                if epoch < 0:
                    raise wire.Malformed("greets with no epoch")
                connection.epoch, connection.their_challenge = epoch, challenge
                token = wire.token_for(self._secret, epoch)
                proof = wire.prove(token, "lender", challenge, connection.own_challenge)
                connection.line.say(wire.Challenge(proof, connection.own_challenge))
            case wire.Answer(proof=proof) if connection.their_challenge and not connection.generation:
                token = wire.token_for(self._secret, connection.epoch)
                right = wire.prove(token, "poster", connection.own_challenge, connection.their_challenge)
                if not hmac.compare_digest(proof, right):
                    self._turn_away(connection, "wrong token", final=True)
                    return
                self._admit(connection)
            case wire.Attached(generation=generation) if connection.window is not None and not connection.attached:
                if generation != connection.generation:
                    raise wire.Malformed("attached under another generation")
                if bytes(connection.window.own()[:TRIAL_BYTES]) != connection.trial:
                    raise wire.Malformed("nothing arrived through its agent")
                connection.attached, connection.deadline = True, None
                self._half_open.remove(connection)
            case wire.Detached() if connection.attached and connection not in self._parting:
                self._let_go(connection)
            case wire.Ended() if connection in self._parting:
                self._parting.remove(connection)
                self._end(connection)
                self._drop(connection, "its agent has ended")
            case other:
                raise wire.Malformed(f"unexpected {type(other).__name__}")

    def _admit(self, connection: Connection) -> None:
        """Asks for an agent; whatever this peer had before ends first."""
        record = self._records.get(connection.epoch)
        living = sum(r.connection is not None for r in self._records.values())
        if living >= self._max_peers and (record is None or record.connection is None):
            self._turn_away(connection, f"{self._max_peers} peers are attached already", final=False)
            return
        if record is None:
            record = self._records[connection.epoch] = PeerRecord(connection.epoch)
        refusal = self._watch_death(record, connection)
        refusal = refusal or self.used_up()
        if refusal is not None:
            self._turn_away(connection, refusal, final=False)
            return
        if record.connection is not None:
            self._drop(record.connection, "attached anew")
        assert self._keeper is not None
        self._last_generation += 1
        connection.generation = record.generation = self._last_generation
        record.first = record.first or self._last_generation
        record.unproven.add(connection.generation)  # on record before anything of it leaves
        record.connection = self._by_generation[connection.generation] = connection
        self._keeper.make(connection.generation)

    def _watch_death(self, record: PeerRecord, connection: Connection) -> str | None:
        """Which process it is, as far as can be known; None, or why it is refused."""
        proves = self._engine.limits.death
        if proves and len(record.unproven) >= MAX_UNPROVEN:
            return f"it attached {MAX_UNPROVEN} times, and only its process's end proves anything"
        if connection.pid == 0:
            return "its process cannot be seen from here, and only its end proves anything" if proves else None
        if record.pidfd is not None:
            return None if record.pid == connection.pid else "another process of this epoch is alive"
        try:
            record.pidfd = os.pidfd_open(connection.pid)
        except OSError:
            return "its process is gone"
        # still connected after pidfd_open: the number was not given to another process in between
        if has_exited(record.pidfd) or not connection.line.is_up():
            os.close(record.pidfd)
            record.pidfd = None
            return "its process is gone"
        record.pid = connection.pid
        self._watch.add(record.pidfd, lambda: self._on_exit(record))
        return None

    def _made(self, generation: int, window: Window | None, agent: bytes, reason: str) -> None:
        """The keeper has an agent for it, or failed."""
        connection = self._by_generation.pop(generation)
        record = self._records[connection.epoch]
        if window is None:
            record.unproven.discard(generation)
            self._turn_away(connection, f"no agent: {reason}", final=False)
            return
        self.counters["agents_lent"] += 1
        if record.connection is not connection:
            return  # gone meanwhile, its agent is being ended
        connection.window, connection.trial = window, secrets.token_bytes(TRIAL_BYTES)
        ended = record.proven_through  # below this generation, which is not proven
        try:
            connection.line.say(wire.Lent(generation, agent, window.base, window.scratch, connection.trial, ended))
        except wire.Closed as error:
            self._drop(connection, str(error))

    def _turn_away(self, connection: Connection, reason: str, final: bool) -> None:
        self.counters["attach_refused"] += 1
        log.warning("a peer of epoch %x is turned away: %s", connection.epoch, reason)
        with contextlib.suppress(wire.Closed):
            connection.line.say(wire.Refused(reason, final))
        self._drop(connection, reason)

    # ------------------------------------------------------------ ending

    def _drop(self, connection: Connection, reason: str) -> None:
        """The attachment is over; its agent ends too, which is what proves it."""
        if connection.line.fileno() < 0:
            return
        self._watch.remove(connection.line.fileno())
        connection.line.close()
        if connection in self._half_open:
            self._half_open.remove(connection)
        if connection in self._parting:
            self._parting.remove(connection)
            self._leave_be(connection)
        record = self._records.get(connection.epoch)
        if record is None or record.connection is not connection:
            return
        if self._must_not_end(connection):
            self._leave_be(connection)
        elif connection.generation in record.unproven:
            self._end(connection)
        record.connection = None
        if connection.attached:
            self.lost.append(PeerLost(record.epoch, connection.generation, reason))

    def _must_not_end(self, connection: Connection) -> bool:
        """Its peer may still be reading through its agent, and this engine does not bear that."""
        return connection.read and not self._engine.limits.ending_read

    def _leave_be(self, connection: Connection) -> None:
        assert self._keeper is not None
        self._left += 1
        self._keeper.leave_be(connection.generation)

    def _end(self, connection: Connection) -> None:
        assert self._keeper is not None
        self._ending[connection.generation] = self._records[connection.epoch]
        self._keeper.end(connection.generation)

    def _let_go(self, connection: Connection) -> None:
        """Its agent ends now, or as soon as the peer says that it reads nothing through it any more."""
        record = self._records[connection.epoch]
        if record.connection is not connection or not self._must_not_end(connection):
            self._drop(connection, "it has let go")
            return
        self._parting.add(connection)
        record.connection = None
        self.lost.append(PeerLost(record.epoch, connection.generation, "it has let go"))

    def _ended(self, generation: int, clean: bool) -> None:
        record = self._ending.pop(generation)
        self.counters["agents_ended"] += 1
        if clean and self._engine.limits.ending:
            record.unproven.discard(generation)
            self._proven(record, generation, "its agent is no more")
            self._say_settled(record)

    def _say_settled(self, record: PeerRecord) -> None:
        """To a peer that was lent its next agent before this one's end."""
        current = record.connection
        if current is None or current.window is None:  # if it is to be lent one, it hears of it then
            return
        try:
            current.line.say(wire.Settled(record.proven_through))
        except wire.Closed as error:
            self._drop(current, str(error))

    def _on_exit(self, record: PeerRecord) -> None:
        if record.pidfd is None or not has_exited(record.pidfd):
            return
        self._watch.remove(record.pidfd)
        os.close(record.pidfd)
        record.pidfd = None
        if record.connection is not None:
            self._drop(record.connection, "its process has ended")
        if self._engine.limits.death or record.read:
            record.unproven.clear()
            record.death = True
        self._proven(record, record.generation, "its process has ended", final=True)

    def _proven(self, record: PeerRecord, generation: int, reason: str, final: bool = False) -> None:
        """Told again, now that the proof can be had."""
        self.lost.append(PeerLost(record.epoch, generation, reason, final))
        self._records[record.epoch] = self._records.pop(record.epoch)  # newest end last
        over = [r.epoch for r in self._records.values() if r.connection is None and not r.unproven]
        for epoch in over[: max(0, len(over) - MAX_ENDED_RECORDS)]:
            del self._records[epoch]

    def tick(self, now: float) -> None:
        for connection in list(self._half_open):
            if connection.deadline is not None and connection.deadline <= now:
                self.counters["attach_refused"] += 1
                self._drop(connection, "did not finish the handshake in time")

    def next_deadline(self) -> float | None:
        return min((c.deadline for c in self._half_open if c.deadline is not None), default=None)

    # ------------------------------------------------------------ what it can prove

    def generation(self, peer_epoch: int) -> int | None:
        record = self._records.get(peer_epoch)
        if record is None or record.connection is None or not record.connection.attached:
            return None
        return record.generation

    def fence(self, peer_epoch: int, generation: int | None) -> FenceProof | None:
        record = self._records.get(peer_epoch)
        if record is None:
            return None
        wanted = generation if generation is not None else record.asked or record.generation
        if wanted > record.generation:  # never lent: nothing to revoke, nothing to prove
            return None
        if wanted > record.proven_through:
            if generation is None:
                record.asked = wanted
            current = record.connection
            can = self._engine.limits.ending and (self._engine.limits.ending_read or not record.read)
            if can and current is not None and current.generation <= wanted:
                self.counters["agents_rebuilt"] += 1
                self._drop(current, "its access was revoked")
            return None
        if generation is None:
            record.asked = 0
        return FenceProof("gone" if record.death else "fenced", peer_epoch, record.proven_through)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        """The agents that copied for it are no more, or where that proves nothing, its process."""
        record = self._records.get(peer_epoch)
        if record is None or record.proven_through < record.first:
            return None
        return FenceProof("gone" if record.death else "fenced", peer_epoch, record.proven_through)

    def is_read(self, peer_epoch: int) -> None:
        """From now on this peer may be reading through its agent."""
        record = self._records.get(peer_epoch)
        if record is not None and record.connection is not None:
            record.read = record.connection.read = True

    def used_up(self) -> str | None:
        if self._left + len(self._parting) < MAX_LEFT:
            return None
        return (
            f"{MAX_LEFT} agents of {self._engine.caps.label} are left over from readers that went away or attached "
            "anew, and cannot be ended while this process lives"
        )

    def knows(self, peer_epoch: int) -> bool:
        """Whether anything was ever lent to it."""
        return peer_epoch in self._records

    def close(self, seconds: float) -> None:
        if self._listener is not None:
            self._watch.remove(self._listener.fileno())
            wire.unlisten(self._listener, self._address)
            self._listener = None
        attached = [r.connection for r in self._records.values() if r.connection is not None]
        for connection in [*self._half_open, *attached, *self._parting]:
            if connection.line.fileno() >= 0:
                self._watch.remove(connection.line.fileno())
                connection.line.close()
            if self._must_not_end(connection):
                self._leave_be(connection)
        for record in self._records.values():
            if record.pidfd is not None:
                self._watch.remove(record.pidfd)
                os.close(record.pidfd)
                record.pidfd = None
        if self._keeper is not None:
            self._keeper.leave(seconds)
