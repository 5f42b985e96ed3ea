"""Page pools in shared memory: a sealed memfd, mapped here and passed to a mover by descriptor, never by name."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from quiesce.transfer.interface import Arena

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def shared_arena(count: int, page_bytes: int) -> Arena:
    """`count` zeroed pages of `page_bytes` bytes in a memfd that can neither shrink nor grow.

    All memory is allocated now, so that a machine that is too small fails here with OSError and not with
    SIGBUS under load. `Arena.fd` stays open for the life of the process; execs do not inherit it.
    """
    if count < 1 or page_bytes < 1:
        raise ValueError(f"an arena needs at least one page of one byte, not {count} x {page_bytes}")
    size = count * page_bytes
    fd = os.memfd_create("quiesce-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        mapped.madvise(mmap.MADV_DONTFORK)
    except OSError:
        os.close(fd)
        raise
    return Arena(np.frombuffer(mapped, dtype=np.uint8).reshape(count, page_bytes), fd)
