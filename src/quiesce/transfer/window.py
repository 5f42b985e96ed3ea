"""A pool mapped once more, at an address of its own: what is placed through one mapping ends with it.

Engines place by address. Each peer is given addresses that no other peer and no later attachment ever has, so a
stale access meets no memory, whatever its engine remembers.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np

from quiesce.transfer.arena import SEALS
from quiesce.transfer.interface import Arena

SCRATCH = mmap.PAGESIZE  # bytes beside the pages, for trial and drain writes

_PROT_NONE, _MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0, 1, 2, 0x10, 0x20, 0x4000
_MADV_DONTFORK = 10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, size: int, protection: int, flags: int, fd: int = -1) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size} bytes of the pool: {os.strerror(error)}")
    return int(found)


def check_arena(arena: Arena, engine: str) -> None:
    """Raises ValueError unless the arena can be mapped again and cannot change its size."""
    if arena.fd is None:
        raise ValueError(f"{engine} needs an arena in shared memory: make it with shared_arena()")
    try:
        sealed = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    if not sealed:
        raise ValueError("the arena can change its size under the engine: make it with shared_arena()")


class Window:
    """`base`: address of page 0. `scratch`: of SCRATCH bytes that are nobody's pages. `room`: bytes of it all."""

    def __init__(self, arena: Arena) -> None:
        """Raises OSError when the address space or the memory does not suffice."""
        assert arena.fd is not None
        self.pages, self.page_bytes = arena.count, arena.page_bytes
        self.size = self.pages * self.page_bytes
        self.room = -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE + SCRATCH
        nothing = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self.base = _map(None, self.room, _PROT_NONE, nothing)
        self.scratch = self.base + self.room - SCRATCH
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        _map(self.base, self.size, readable, _MAP_SHARED | _MAP_FIXED, arena.fd)
        _map(self.scratch, SCRATCH, readable, _MAP_SHARED | _MAP_ANONYMOUS | _MAP_FIXED)
        _libc.madvise(self.base, self.room, _MADV_DONTFORK)
        self._own = np.ctypeslib.as_array((ctypes.c_ubyte * SCRATCH).from_address(self.scratch))

    def own(self) -> np.ndarray:
        """The scratch bytes: uint8 [SCRATCH]. Not to be used after `retire`."""
        return self._own

    def addresses(self, pages: np.ndarray) -> np.ndarray:
        """uint64 addresses of these pages."""
        return pages.astype(np.uint64) * np.uint64(self.page_bytes) + np.uint64(self.base)

    def divert(self) -> None:
        """What is still stored through these addresses by this process lands in memory that nobody looks at. Exact as
        soon as it returns; a device, or another process that copies, is not diverted."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self.base, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags)

    def retire(self) -> None:
        """Nothing is mapped there any more, nor ever will be in this process. It costs address space alone."""
        _map(self.base, self.room, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)
