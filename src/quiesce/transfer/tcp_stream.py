"""One connection after its handshake: page bytes go straight between the socket and the pool, under a gate.

Placing is exact: bytes are received into pages only under the lane's lock and only while their gate is open. Whoever
shuts a gate and has then held the lock once knows that not a byte more goes through it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

from quiesce.transfer.tcp_pages import Few, Pieces, only
from quiesce.transfer.tcp_wire import Closed

SCRATCH_BYTES = 1 << 20
_YIELD = 20e-6  # seconds; long enough for whoever knocks to get the lock


class Gate:
    """What may be touched under one grant or by one read, until it is shut. Shut once, never opened again."""

    __slots__ = ("open", "pages")

    def __init__(self, pages: frozenset[int]) -> None:
        self.pages = pages
        self.open = True


class Stream:
    """A connected socket, plain or TLS. One thread receives and one sends at a time. A plain one blocks where its
    thread has nothing else to do, which saves a look and a wait each time; never for pages under a gate."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.late_bytes = 0  # arrived after their gate was shut
        self._lock = threading.Lock()
        self._knocking = False  # a hint, for fairness
        self._over = False
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._tls_lock = threading.Lock()  # one TLS session bears one caller at a time
        self._scratch: memoryview | None = None
        self._pollers: dict[int, select.poll] = {}  # by event: whoever sends does not share one with whoever receives
        self.set_mode()

    def set_mode(self) -> None:
        """As its threads use it; a handshake may have set a timeout."""
        self.sock.setblocking(self._tls is None)

    def fileno(self) -> int:
        return self.sock.fileno()

    # ------------------------------------------------------------ ending and fencing

    def end(self) -> None:
        """From its return on no byte of this connection is placed. Its threads see Closed."""
        self._over = True
        shut(self.sock)
        self.barrier()

    def barrier(self) -> None:
        """Waits for the one receive or send of page bytes that may be under way: at most one system call."""
        self._knocking = True
        with self._lock:
            self._knocking = False

    # ------------------------------------------------------------ bytes

    def receive_some(self, view: memoryview) -> int | None:
        """Bytes received, or None when there are none now: for headers and answers, not for pages. Raises Closed."""
        try:
            if self._tls is not None:
                with self._tls_lock:
                    got = self._tls.recv_into(view)
            else:
                got = self.sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (OSError, ValueError) as error:  # ValueError: of a TLS session that has ended
            raise Closed(str(error)) from error
        if not got:
            raise Closed("closed by the other side")
        return got

    def _try_fill(self, pieces: Pieces | Few) -> bool:
        """False: nothing has come now. Raises Closed."""
        if self._tls is not None:
            got = self.receive_some(pieces.front())
            pieces.advance(got or 0)
            return got is not None
        try:
            got = pieces.receive(self.sock, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise Closed(str(error)) from error
        if not got:
            raise Closed("closed by the other side")
        return True

    def try_send(self, pieces: Pieces | Few) -> bool:
        """What there is room for now; False: there is none. Raises Closed."""
        try:
            if self._tls is not None:
                with self._tls_lock:
                    pieces.advance(self._tls.send(pieces.front()))
            else:
                pieces.send(self.sock, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error
        return True

    def wait(self, event: int) -> None:
        poller = self._pollers.get(event)
        if poller is None:
            poller = self._pollers[event] = select.poll()
            poller.register(self.sock, event)
        poller.poll()
        if self._over:
            raise Closed("ended here")

    def receive(self, size: int, more: int = 0) -> memoryview:
        """`size` bytes, waiting for them, and up to `more` that have come with them."""
        out, got = memoryview(bytearray(size + more)), 0
        while got < size:
            got += self._receive(out[got:])
        return out[:got]

    def _receive(self, view: memoryview) -> int:
        if self._tls is None:
            try:
                got = self.sock.recv_into(view)
            except OSError as error:
                raise Closed(str(error)) from error
            if not got or self._over:
                raise Closed("ended here" if self._over else "closed by the other side")
            return got
        while (some := self.receive_some(view)) is None:
            self.wait(select.POLLIN)
        return some

    def send(self, data: bytes) -> None:
        """All of it, waiting for room."""
        try:
            if self._tls is None:
                self.sock.sendall(data, socket.MSG_NOSIGNAL)
                return
        except OSError as error:
            raise Closed("ended here" if self._over else str(error)) from error
        self.send_pieces(only(data))

    def send_pieces(self, pieces: Pieces | Few) -> None:
        """All of it, waiting for room."""
        while pieces.left:
            self._send(pieces)

    def _send(self, pieces: Pieces | Few) -> None:
        if self._tls is None:
            try:
                pieces.send(self.sock, socket.MSG_NOSIGNAL)
            except InterruptedError:
                return
            except OSError as error:
                raise Closed("ended here" if self._over else str(error)) from error
        elif not self.try_send(pieces):
            self.wait(select.POLLOUT)

    # ------------------------------------------------------------ page bytes

    def place(self, gate: Gate, pieces: Pieces | Few) -> bool:
        """Fills them; what comes while the gate is shut goes nowhere. True: all of it was placed."""
        while pieces.left:
            self._let_in()
            with self._lock:
                if self._over:
                    raise Closed("ended here")
                if not gate.open:
                    break
                some = self._try_fill(pieces)
            if not some:
                self.wait(select.POLLIN)
        self.discard(pieces.left)
        return not pieces.left

    def discard(self, size: int) -> None:
        """Receives `size` bytes into memory that is nobody's page."""
        if size and self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        while size:
            assert self._scratch is not None
            got = self.receive_some(self._scratch[:size])
            if got is None:
                self.wait(select.POLLIN)
            else:
                size -= got
                self.late_bytes += got

    def serve(self, gate: Gate, pieces: Pieces | Few) -> bool:
        """Sends them; once the gate is shut zeros take their place. True: all of it was the pages' own."""
        while pieces.left:
            self._let_in()
            with self._lock:
                if self._over:
                    raise Closed("ended here")
                if not gate.open:
                    break
                some = self.try_send(pieces)
            if not some:
                self.wait(select.POLLOUT)
        for start in range(0, pieces.left, SCRATCH_BYTES):
            self.send(bytes(min(SCRATCH_BYTES, pieces.left - start)))
        return not pieces.left

    def _let_in(self) -> None:
        """Locks are not fair: step back while somebody wants to know that nothing is under way."""
        while self._knocking:
            time.sleep(_YIELD)


def shut(sock: socket.socket) -> None:
    """Ends it under the threads that use it. Of the plain socket: `SSLSocket.shutdown` drops the session, and a
    receive that is under way would then take the raw bytes of the wire for a page's."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
