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
from collections.abc import Sequence

from quiesce.transfer.tcp_wire import Closed

IOV = 64  # page views in one system call
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

    def _try_receive(self, views: Sequence[memoryview]) -> int | None:
        """Bytes received, or None when there are none now. Raises Closed."""
        try:
            if self._tls is not None:
                with self._tls_lock:
                    got = self._tls.recv_into(views[0])
            elif len(views) == 1:
                got = self.sock.recv_into(views[0], 0, socket.MSG_DONTWAIT)
            else:
                got = self.sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (OSError, ValueError) as error:  # ValueError: of a TLS session that has ended
            raise Closed(str(error)) from error
        if not got:
            raise Closed("closed by the other side")
        return got

    def try_send(self, views: Sequence[memoryview]) -> int:
        """Bytes sent of the first IOV views, 0 when there is no room now. Raises Closed."""
        try:
            if self._tls is not None:
                with self._tls_lock:
                    return self._tls.send(views[0])
            return self.sock.sendmsg(views[:IOV], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error

    def wait(self, event: int) -> None:
        poller = self._pollers.get(event)
        if poller is None:
            poller = self._pollers[event] = select.poll()
            poller.register(self.sock, event)
        poller.poll()
        if self._over:
            raise Closed("ended here")

    def receive_some(self, view: memoryview) -> int | None:
        """Never waits: for headers and answers, not for pages."""
        return self._try_receive((view,))

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
        while (some := self._try_receive((view,))) is None:
            self.wait(select.POLLIN)
        return some

    def send(self, data: bytes) -> None:
        self.send_views([memoryview(data)])

    def send_views(self, views: list[memoryview]) -> None:
        """All of it, waiting for room."""
        first = 0
        while first < len(views):
            first = advance(views, first, self._send(views[first : first + IOV]))

    def _send(self, views: Sequence[memoryview]) -> int:
        if self._tls is None:
            try:
                return self.sock.sendmsg(views, (), socket.MSG_NOSIGNAL)
            except OSError as error:
                raise Closed("ended here" if self._over else str(error)) from error
        while not (sent := self.try_send(views)):
            self.wait(select.POLLOUT)
        return sent

    # ------------------------------------------------------------ page bytes

    def place(self, gate: Gate, views: list[memoryview]) -> bool:
        """Receives into `views`; what comes while the gate is shut goes nowhere. True: all of it was placed."""
        first = 0
        while first < len(views):
            self._let_in()
            with self._lock:
                if self._over:
                    raise Closed("ended here")
                if not gate.open:
                    break
                got = self._try_receive(views[first : first + IOV])
            if got is None:
                self.wait(select.POLLIN)
            else:
                first = advance(views, first, got)
        if first == len(views):
            return True
        self.discard(sum(map(len, views[first:])))
        return False

    def discard(self, size: int) -> None:
        """Receives `size` bytes into memory that is nobody's page."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        while size:
            got = self._try_receive((self._scratch[:size],))
            if got is None:
                self.wait(select.POLLIN)
            else:
                size -= got
                self.late_bytes += got

    def serve(self, gate: Gate, views: list[memoryview]) -> bool:
        """Sends `views`; once the gate is shut zeros take their place. True: all of it was the pages' own."""
        first = 0
        while first < len(views):
            self._let_in()
            with self._lock:
                if self._over:
                    raise Closed("ended here")
                if not gate.open:
                    break
                sent = self.try_send(views[first : first + IOV])
            if not sent:
                self.wait(select.POLLOUT)
            first = advance(views, first, sent)
        if first == len(views):
            return True
        for view in views[first:]:
            self.send(bytes(len(view)))
        return False

    def _let_in(self) -> None:
        """Locks are not fair: step back while somebody wants to know that nothing is under way."""
        while self._knocking:
            time.sleep(_YIELD)


def shut(sock: socket.socket) -> None:
    """Ends it under the threads that use it. Of the plain socket: `SSLSocket.shutdown` drops the session, and a
    receive that is under way would then take the raw bytes of the wire for a page's."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def advance(views: list[memoryview], first: int, count: int) -> int:
    """The index of the first view not done after `count` more bytes; that view is cut to what is left of it."""
    while count:
        size = len(views[first])
        if count < size:
            views[first] = views[first][count:]
            return first
        count -= size
        first += 1
    return first


def page_views(memory: memoryview, page_bytes: int, pages: Sequence[int]) -> list[memoryview]:
    """Their bytes in order; neighbours in one piece."""
    views = []
    start = end = -1
    for page in pages:
        if page != end:
            if end > start:
                views.append(memory[start * page_bytes : end * page_bytes])
            start = page
        end = page + 1
    if end > start:
        views.append(memory[start * page_bytes : end * page_bytes])
    return views
