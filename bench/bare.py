"""What the transports are measured against: the same page lists through the same engine, by a loop and nothing else.

A `Bare` moves page lists from its own arena and returns when the last byte is in place at the other end. One that
needs a process there names a receiver of `RECEIVERS`, which bench.transfer_lender runs.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quiesce.transfer.arena import shared_arena

Pages = Sequence[tuple[list[int], list[int]]]  # (source, target) of each transfer
IOV = 64


class Bare(Protocol):
    def move(self, transfers: Pages) -> None:
        """All of them, each told of when it is in place."""

    def close(self) -> None: ...


class Memcpy:
    """Plain copies between two shared arenas, page by page."""

    def __init__(self, pages: int, page_bytes: int, core: int) -> None:
        self._source, self._target = shared_arena(pages, page_bytes).pages, shared_arena(pages, page_bytes).pages
        self._source[:] = 1

    def move(self, transfers: Pages) -> None:
        source, target = self._source, self._target
        for own, theirs in transfers:
            for a, b in zip(own, theirs, strict=True):
                target[b] = source[a]

    def close(self) -> None:
        pass


_COUNT = struct.Struct("<I")


class Sockets:
    """One blocking connection: `sendmsg` of page views, and an answer of one byte a transfer."""

    def __init__(self, pages: int, page_bytes: int, core: int) -> None:
        self._size = page_bytes
        self._memory = memoryview(shared_arena(pages, page_bytes).pages.reshape(-1))  # type: ignore[arg-type]
        np.frombuffer(self._memory, np.uint8)[:] = 1
        words = ["bare", "tcp", str(pages), str(page_bytes), str(core)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_lender", *words], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._sock = socket.create_connection(("127.0.0.1", int(self._process.stdout.readline())))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, transfers: Pages) -> None:
        for own, theirs in transfers:
            head = _COUNT.pack(len(theirs)) + struct.pack(f"<{len(theirs)}I", *theirs)
            send_all(self._sock, [memoryview(head), *views(self._memory, self._size, own)])
        left = len(transfers)
        while left:
            left -= len(self._sock.recv(left))

    def close(self) -> None:
        self._sock.close()
        self._process.wait(5)


def views(memory: memoryview, size: int, pages: Sequence[int]) -> list[memoryview]:
    return [memory[page * size : (page + 1) * size] for page in pages]


def send_all(sock: socket.socket, left: list[memoryview]) -> None:
    first = 0
    while first < len(left):
        first = advance(left, first, sock.sendmsg(left[first : first + IOV]))


def advance(left: list[memoryview], first: int, count: int) -> int:
    """The index of the first view not done after `count` more bytes; that view is cut to what is left of it."""
    while count:
        size = len(left[first])
        if count < size:
            left[first] = left[first][count:]
            return first
        count -= size
        first += 1
    return first


def receive_sockets(pages: int, page_bytes: int) -> None:
    memory = memoryview(shared_arena(pages, page_bytes).pages.reshape(-1))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := sock.recv(_COUNT.size, socket.MSG_WAITALL):
        (count,) = _COUNT.unpack(head)
        targets = struct.unpack(f"<{count}I", sock.recv(4 * count, socket.MSG_WAITALL))
        left = views(memory, page_bytes, targets)
        first = 0
        while first < len(left):
            first = advance(left, first, sock.recvmsg_into(left[first : first + IOV])[0])
        sock.sendall(b"k")


def _nixl(lane: str) -> Callable[[int, int, int], Bare]:
    def make(pages: int, page_bytes: int, core: int) -> Bare:
        from bench.bare_engines import Nixl  # noqa: PLC0415

        return Nixl(lane, pages, page_bytes, core)  # type: ignore[arg-type]

    return make


def _mooncake(pages: int, page_bytes: int, core: int) -> Bare:
    from bench.bare_engines import Mooncake  # noqa: PLC0415

    return Mooncake(pages, page_bytes, core)


def _receive_nixl(lane: str) -> Callable[[int, int], None]:
    def receive(pages: int, page_bytes: int) -> None:
        from bench.bare_engines import receive_nixl  # noqa: PLC0415

        receive_nixl(lane, pages, page_bytes)  # type: ignore[arg-type]

    return receive


def _receive_mooncake(pages: int, page_bytes: int) -> None:
    from bench.bare_engines import receive_mooncake  # noqa: PLC0415

    receive_mooncake(pages, page_bytes)


# By engine: (pages, bytes, core). Libraries of others load where they are asked for.
BARE: dict[str, Callable[[int, int, int], Bare]] = {
    "shm": Memcpy,
    "tcp": Sockets,
    "nixl/tcp": _nixl("tcp"),
    "nixl/cma": _nixl("cma"),
    "mooncake/tcp": _mooncake,
}
RECEIVERS: dict[str, Callable[[int, int], None]] = {
    "tcp": receive_sockets,
    "nixl/tcp": _receive_nixl("tcp"),
    "nixl/cma": _receive_nixl("cma"),
    "mooncake/tcp": _receive_mooncake,
}
