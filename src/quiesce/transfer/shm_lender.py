"""The lending side of shared memory: lets movers map the pool, knows which live, and kills one to fence it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from quiesce.transfer import mover_wire as wire
from quiesce.transfer.incoming import incoming
from quiesce.transfer.interface import Arena, FenceProof, PeerLost
from quiesce.transfer.watch import Watch, has_exited

log = logging.getLogger("quiesce.transfer")

MAX_HALF_OPEN = 32
MAX_DEAD_RECORDS = 4096  # beyond it the oldest proof is forgotten: pages are then held longer, never freed
_SUN_PATH = 107

Lets = Literal["write", "read", "both"]  # what a peer's mover may do to the pool


@dataclass
class Connection:
    """One socket from one mover, from accept to end of file."""

    sock: socket.socket
    pid: int
    pidfd: int
    deadline: float | None
    epoch: int = 0
    nonce: bytes = b""  # set once the token was right
    engine: int = -1  # pidfd of the engine that it serves
    generation: int = 0  # set once the memory was passed
    attached: bool = False


@dataclass
class PeerRecord:
    """All that was ever attached for one peer epoch: at most one living mover, everything before it dead."""

    epoch: int
    pid: int = 0
    pidfd: int | None = None  # of the living mover
    engine: int = -1  # pidfd of its engine, while that lives and is known
    connection: Connection | None = None
    generation: int = 0  # the newest that was handed out
    dead_through: int = 0  # whatever copied under generations <= this is dead
    killed: bool = False
    asked: int = 0  # fence without a number: the generation it was first asked for


class Lender:
    def __init__(self, watch: Watch, run_dir: Path, epoch: int, max_peers: int, lets: Lets) -> None:
        self._watch = watch
        self._lets: Lets = lets
        self._path = run_dir.resolve() / f"m{secrets.token_hex(6)}.sock"
        self._epoch = epoch
        self._max_peers = max_peers
        self._token = secrets.token_bytes(32)
        self._arena: Arena | None = None
        self._region = 0
        self._listener: socket.socket | None = None
        self._half_open: list[Connection] = []
        self._records: dict[int, PeerRecord] = {}
        self._last_generation = 0
        self.lost: list[PeerLost] = []
        self.refused = 0  # connections that were turned away, for the metrics

    def lend(self, arena: Arena, region: int) -> None:
        self._arena, self._region = arena, region

    def descriptor(self) -> bytes:
        if self._arena is None:
            raise ValueError("register an arena before handing out its descriptor")
        if self._listener is None:
            self._listen()
        return msgspec.msgpack.encode(
            wire.Descriptor(
                kind="shm",
                path=str(self._path),
                token=self._token,
                epoch=self._epoch,
                region=self._region,
                pages=self._arena.count,
                page_bytes=self._arena.page_bytes,
                access=self._lets,
            )
        )

    def _listen(self) -> None:
        if len(os.fsencode(self._path)) > _SUN_PATH:
            raise ValueError(
                f"{self._path} is longer than {_SUN_PATH} bytes, the most a unix socket can have: "
                "choose a shorter run directory"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)  # before listen(), so nobody connects earlier
            listener.listen(MAX_HALF_OPEN)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._watch.add(listener.fileno(), self._accept)

    # ------------------------------------------------------------ attaching

    def _accept(self) -> None:
        assert self._listener is not None
        for sock, _ in incoming(self._listener, MAX_HALF_OPEN, log, "a mover"):
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        pid, uid = wire.peer_credentials(sock)
        refusal = None
        if uid != os.getuid():
            refusal = f"it runs as user {uid}, this engine as {os.getuid()}"
        elif pid <= 0:
            refusal = "it is in another PID namespace, where its death cannot be seen"
        elif len(self._half_open) >= MAX_HALF_OPEN:
            refusal = f"{MAX_HALF_OPEN} hand-shakes are unfinished"
        if refusal is not None:
            self.refused += 1
            log.warning("mover %d refused: %s", pid, refusal)
            sock.close()
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # dead already
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        connection = Connection(sock, pid, pidfd, time.monotonic() + wire.ATTACH_SECONDS)
        self._half_open.append(connection)
        self._watch.add(sock.fileno(), lambda: self._on_packet(connection))

    def _on_packet(self, connection: Connection) -> None:
        try:
            got = wire.receive(connection.sock, wire.LenderDecoder)
            if got is None:
                return
            try:
                self._step(connection, got)
            finally:
                wire.close_all(got.fds)
        except wire.Closed:
            self._drop(connection, "mover closed its connection")
        except wire.Malformed as error:
            self.refused += 1
            log.warning("mover %d broke the hand-shake: %s", connection.pid, error)
            self._drop(connection, "broke the hand-shake")

    def _step(self, connection: Connection, got: wire.Received) -> None:
        match got.packet:
            case wire.Greet() as greet if not connection.nonce:
                if not hmac.compare_digest(greet.token, self._token):
                    self._turn_away(connection, "wrong token", final=True)
                    return
                connection.epoch = greet.epoch
                connection.nonce = secrets.token_bytes(16)
                self._say(connection, wire.Challenge(connection.nonce))
            case wire.Answer(nonce=nonce) if connection.nonce and not connection.generation:
                # the same process still speaks after pidfd_open: the pid was not reused in between
                same = got.pid == connection.pid and not has_exited(connection.pidfd)
                if not same or not hmac.compare_digest(nonce, connection.nonce):
                    raise wire.Malformed("the answer is not from the process that connected")
                connection.engine = got.fds.pop() if len(got.fds) == 1 else -1
                self._pass_memory(connection)
            case wire.Mapped(generation=generation) if connection.generation and not connection.attached:
                if generation != connection.generation:
                    raise wire.Malformed("mapped under another generation")
                connection.attached, connection.deadline = True, None
                self._half_open.remove(connection)
            case other:
                raise wire.Malformed(f"unexpected {type(other).__name__}")

    def _pass_memory(self, connection: Connection) -> None:
        record = self._records.get(connection.epoch)
        if record is not None and record.pidfd is not None and has_exited(record.pidfd):
            self._died(record)
        if record is not None and record.pidfd is not None and (record.pid != connection.pid or record.killed):
            self._turn_away(connection, "another mover of this epoch is alive", final=False)
            return
        living = sum(r.pidfd is not None for r in self._records.values())
        if living >= self._max_peers and (record is None or record.pidfd is None):
            self._turn_away(connection, f"{self._max_peers} peers are attached already", final=False)
            return
        if record is None:
            record = self._records.setdefault(connection.epoch, PeerRecord(connection.epoch))
        elif record.connection is not None:
            self._drop(record.connection, "attached anew")
        # from here on the process may write: it is on record before the descriptor leaves
        if record.pidfd is None:
            record.pid, record.pidfd, record.killed = connection.pid, connection.pidfd, False
            connection.pidfd = -1
            self._watch.add(record.pidfd, lambda: self._on_exit(record))
        if record.engine < 0 <= connection.engine:
            record.engine, connection.engine = connection.engine, -1
            self._watch.add(record.engine, lambda: self._on_engine_exit(record))
        elif connection.engine >= 0:  # a later mover of the same engine: that is watched already
            os.close(connection.engine)
            connection.engine = -1
        self._last_generation += 1
        record.generation = connection.generation = self._last_generation
        record.connection = connection
        assert self._arena is not None and self._arena.fd is not None
        memory = wire.Memory(connection.generation, self._region, self._arena.count, self._arena.page_bytes)
        if self._lets != "read":
            self._say(connection, memory, (self._arena.fd,))
            return
        # opened anew, so that a reader cannot write into the pool that it reads from
        read_only = os.open(f"/proc/self/fd/{self._arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._say(connection, memory, (read_only,))
        finally:
            os.close(read_only)

    def _say(self, connection: Connection, packet: wire.Packet, fds: tuple[int, ...] = ()) -> None:
        if not wire.send(connection.sock, packet, fds):
            raise wire.Malformed("does not read what it is sent")

    def _turn_away(self, connection: Connection, reason: str, final: bool) -> None:
        self.refused += 1
        log.warning("mover %d of epoch %x turned away: %s", connection.pid, connection.epoch, reason)
        self._say(connection, wire.TurnedAway(reason, final))
        self._drop(connection, reason)

    # ------------------------------------------------------------ ending

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.sock.fileno() < 0:
            return
        self._watch.remove(connection.sock.fileno())
        connection.sock.close()
        if connection.pidfd >= 0:
            os.close(connection.pidfd)
            connection.pidfd = -1
        if connection.engine >= 0:
            os.close(connection.engine)
            connection.engine = -1
        if connection in self._half_open:
            self._half_open.remove(connection)
        record = self._records.get(connection.epoch)
        if record is None or record.connection is not connection:
            return
        record.connection = None
        if record.pidfd is not None and has_exited(record.pidfd):
            self._died(record)
        elif connection.attached:
            self.lost.append(PeerLost(record.epoch, connection.generation, f"detached: {reason}", False))

    def _on_exit(self, record: PeerRecord) -> None:
        if record.pidfd is not None and has_exited(record.pidfd):
            self._died(record)

    def _on_engine_exit(self, record: PeerRecord) -> None:
        """Its mover dies with it, but nobody will attach for it any more."""
        if record.engine < 0 or not has_exited(record.engine):
            return
        self._let_go(record)
        self.lost.append(PeerLost(record.epoch, record.generation, "its engine died", True))

    def _let_go(self, record: PeerRecord) -> None:
        if record.engine >= 0:
            self._watch.remove(record.engine)
            os.close(record.engine)
            record.engine = -1

    def _died(self, record: PeerRecord) -> None:
        assert record.pidfd is not None
        self._watch.remove(record.pidfd)
        os.close(record.pidfd)
        record.pidfd, record.dead_through = None, record.generation
        reason = "mover was killed by a fence" if record.killed else "mover died"
        self.lost.append(PeerLost(record.epoch, record.generation, reason))
        if record.connection is not None:
            connection, record.connection = record.connection, None
            self._drop(connection, reason)
        self._records[record.epoch] = self._records.pop(record.epoch)  # newest death last
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        dead = [epoch for epoch, record in self._records.items() if record.pidfd is None]
        for epoch in dead[: max(0, len(dead) - MAX_DEAD_RECORDS)]:
            self._let_go(self._records.pop(epoch))

    def tick(self, now: float) -> None:
        if not self._half_open:
            return
        for connection in list(self._half_open):
            if connection.deadline is not None and connection.deadline <= now:
                self.refused += 1
                self._drop(connection, "did not finish the hand-shake in time")

    def next_deadline(self) -> float | None:
        if not self._half_open:
            return None
        return min((c.deadline for c in self._half_open if c.deadline is not None), default=None)

    # ------------------------------------------------------------ what it can prove

    def generation(self, peer_epoch: int) -> int | None:
        record = self._records.get(peer_epoch)
        if record is None or record.killed or record.connection is None or not record.connection.attached:
            return None
        return record.generation

    def knows(self, peer_epoch: int) -> bool:
        """Whether it was ever let in."""
        return peer_epoch in self._records

    def fence(self, peer_epoch: int, generation: int | None) -> FenceProof | None:
        record = self._records.get(peer_epoch)
        if record is None:
            return None
        wanted = generation if generation is not None else record.asked or record.generation
        if wanted > record.generation:  # never handed out: nothing to revoke, nothing to prove
            return None
        if record.pidfd is not None and wanted > record.dead_through:
            self._kill(record)
        if wanted > record.dead_through:
            if generation is None:
                record.asked = wanted
            return None
        if generation is None:
            record.asked = 0
        return FenceProof("fenced", peer_epoch, record.dead_through)

    def _kill(self, record: PeerRecord) -> None:
        assert record.pidfd is not None
        record.killed = True
        try:
            signal.pidfd_send_signal(record.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError as error:
            log.error("cannot kill mover %d of epoch %x: %s", record.pid, record.epoch, error)
        if has_exited(record.pidfd):
            self._died(record)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        record = self._records.get(peer_epoch)
        if record is None:
            return None
        if record.pidfd is not None and has_exited(record.pidfd):
            self._died(record)
        return FenceProof("gone", peer_epoch, record.dead_through) if record.dead_through else None

    def close(self) -> None:
        """Ends every attachment. Movers unmap on their own when they see it, so this is no proof of anything:
        the pool's memory goes with its last user, and no later pool is reachable through it."""
        if self._listener is not None:
            self._watch.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for connection in list(self._half_open):
            self._drop(connection, "lender closed")
        for record in list(self._records.values()):
            if record.connection is not None:
                self._drop(record.connection, "lender closed")
            if record.pidfd is not None:
                self._watch.remove(record.pidfd)
                os.close(record.pidfd)
                record.pidfd = None
            self._let_go(record)
