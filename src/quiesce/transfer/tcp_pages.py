"""Page bytes as the kernel takes them: one array of addresses and lengths, made once for all pages of a job.

One system call sends or fills up to `RUNS` of them, straight from and to the pool.
"""

from __future__ import annotations

import ctypes
import os
import socket
from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

RUNS = 256  # in one system call
FEW = 4  # pages, up to which arrays cost more than they save
_WORD = 8  # bytes of an address and of a length: what follows is for 64 bits, as is all of Quiesce


class _Message(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("runs", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class Pool:
    """Pages of a pool: uint8 [pages, page_bytes], C-contiguous."""

    def __init__(self, pages: np.ndarray) -> None:
        self.view = memoryview(pages.reshape(-1))  # type: ignore[arg-type]
        self.address = int(pages.ctypes.data)
        self.count, self.page_bytes = (int(each) for each in pages.shape)

    def pieces(self, numbers: Sequence[int], head: bytes = b"") -> Pieces | Few:
        """`head`, then these pages in order. Raises IndexError for one outside the pool: what is made here goes to
        the kernel as bare addresses."""
        count, size, base = len(numbers), self.page_bytes, self.address
        if count and not (min(numbers) >= 0 and max(numbers) < self.count):
            raise IndexError(f"a page is outside 0..{self.count - 1}")
        if count <= FEW:
            view = self.view
            return Few([memoryview(head)] * bool(head) + [view[page * size : (page + 1) * size] for page in numbers])
        front = array("B", head)
        words = array("Q", front.buffer_info() if head else ())
        pages = array("Q", bytes(16 * count))
        pages[::2] = array("Q", [base + page * size for page in numbers])
        pages[1::2] = array("Q", (size,)) * count
        ends = range(len(head) + size, len(head) + size * count + 1, size)
        return Pieces(self, front, words + pages, [len(head), *ends] if head else [*ends])


class Pieces:
    """Runs of bytes, in order; what was moved is cut off in front. Keeps alive what it points at."""

    __slots__ = ("_at", "_ends", "_first", "_head", "_message", "_moved", "_pool", "_where", "_words", "left")

    def __init__(self, pool: Pool, head: array[int], words: array[int], ends: list[int]) -> None:
        """`words`: address and length of each run; `ends`: bytes up to the end of each."""
        self._pool, self._head, self._words, self._ends = pool, head, words, ends
        self._at = words.buffer_info()[0]
        self._message = _Message()
        self._where = ctypes.addressof(self._message)
        self._moved = self._first = 0
        self.left = ends[-1] if ends else 0  # bytes

    def send(self, sock: socket.socket, flags: int) -> int:
        """One `sendmsg`. Raises OSError."""
        return self._move(_libc.sendmsg, sock.fileno(), flags)

    def receive(self, sock: socket.socket, flags: int) -> int:
        """One `recvmsg`; 0: end of file. Raises OSError."""
        return self._move(_libc.recvmsg, sock.fileno(), flags)

    def _move(self, call: ctypes._NamedFuncPointer, fd: int, flags: int) -> int:
        message = self._message
        message.runs = self._at + 2 * _WORD * self._first
        message.count = min(RUNS, len(self._ends) - self._first)
        count = int(call(fd, self._where, flags))
        if count < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.advance(count)
        return count

    def advance(self, count: int) -> None:
        """That many bytes more are over."""
        self.left -= count
        self._moved += count
        first = self._first = bisect_right(self._ends, self._moved, self._first)
        if self.left:
            words, left = self._words, self._ends[first] - self._moved
            words[2 * first] += words[2 * first + 1] - left
            words[2 * first + 1] = left

    def front(self) -> memoryview:
        """The bytes of the first run, where each has to be moved by Python."""
        start, size = self._words[2 * self._first], self._words[2 * self._first + 1]
        if self._head and not self._first:
            return memoryview(self._head)[len(self._head) - size :]
        offset = start - self._pool.address
        return self._pool.view[offset : offset + size]


class Few:
    """The same by Python's own calls, which are the quicker ones for a page or two."""

    __slots__ = ("_views", "left")

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self.left = sum(map(len, views))

    def send(self, sock: socket.socket, flags: int) -> int:
        count = sock.sendmsg(self._views, (), flags)
        self.advance(count)
        return count

    def receive(self, sock: socket.socket, flags: int) -> int:
        views = self._views
        count = sock.recv_into(views[0], 0, flags) if len(views) == 1 else sock.recvmsg_into(views, 0, flags)[0]
        self.advance(count)
        return count

    def advance(self, count: int) -> None:
        self.left -= count
        views = self._views
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]

    def front(self) -> memoryview:
        return self._views[0]


def only(head: bytes) -> Few:
    return Few([memoryview(head)])
