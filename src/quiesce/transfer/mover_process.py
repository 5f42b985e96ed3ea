"""The engine's handle on its mover process: start, talk, notice its death, reap."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from quiesce.transfer import mover_wire as wire
from quiesce.transfer.interface import Arena
from quiesce.transfer.watch import Watch, has_exited

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class MoverProcess:
    """`on_packet(packet)` for everything it says: whether more is owed; then `on_exit()` once, after it is dead and
    reaped. `writes`: into the engine's own pool, which pull needs; without it the mover cannot."""

    def __init__(
        self,
        watch: Watch,
        arena: Arena,
        on_packet: Callable[[object], bool],
        on_exit: Callable[[], None],
        writes: bool = False,
    ) -> None:
        assert arena.fd is not None
        self._watch = watch
        self._on_packet, self._on_exit = on_packet, on_exit
        self.started = time.monotonic()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # opened anew, so that a mover that only reads from the pool cannot write into it
        access, mode = ("write", os.O_RDWR) if writes else ("read", os.O_RDONLY)
        own = os.open(f"/proc/self/fd/{arena.fd}", mode | os.O_CLOEXEC)
        try:
            words = (theirs.fileno(), own, arena.count, arena.page_bytes, os.getpid(), access)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quiesce.transfer.mover", *map(str, words)],
                pass_fds=(theirs.fileno(), own),
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()
            os.close(own)
        self._hearing = wire.Hearing(self._sock, wire.EngineDecoder)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)  # our own unreaped child: the pid cannot have been reused
        watch.add(self._sock.fileno(), self._on_readable)
        watch.add(self._pidfd, self._on_death)

    def send(self, packet: wire.Packet) -> bool:
        """False: not now, its socket is full or it is dying; `on_exit` follows in the latter case."""
        try:
            return wire.send(self._sock, packet)
        except wire.Closed:
            self.kill()
            return False

    def want_writable(self, wanted: bool) -> None:
        self._watch.want_writable(self._sock.fileno(), wanted)

    def _on_readable(self) -> None:
        try:
            for _ in range(256):
                packet = self._hearing.next()
                if packet is None or not self._on_packet(packet):
                    return  # what nobody waits for wakes us again; a look in vain costs as much as a packet
        except (wire.Closed, wire.Malformed):
            self._watch.remove(self._sock.fileno())
            self.kill()  # its word cannot be had any more; its death can

    def _on_death(self) -> None:
        if not has_exited(self._pidfd):
            return
        self._drain()
        self._watch.remove(self._sock.fileno())
        self._watch.remove(self._pidfd)
        self._process.wait()
        self._sock.close()
        os.close(self._pidfd)
        self._on_exit()

    def _drain(self) -> None:
        """What it finished before it died counts as placed."""
        try:
            while (packet := self._hearing.next()) is not None:
                self._on_packet(packet)
        except (wire.Closed, wire.Malformed):
            pass

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill and reap, at once; `on_exit` is called before this returns."""
        self.kill()
        self._process.wait()
        self._on_death()
