"""The pool's memory: shared, zero, page-major, and one page one contiguous run of bytes."""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from quiesce.engine.config import read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.kv import KVPool


def pool(tiny: Path, *, pages: int = 6, page_size: int = 4) -> KVPool:
    return KVPool(read_config(tiny), pages=pages, page_size=page_size, dtype="float32", device=torch.device("cpu"))


def test_another_mapping_of_the_fd_sees_what_is_written(tiny: Path) -> None:
    kv = pool(tiny)
    arena = kv.arena
    assert arena.fd is not None
    assert (arena.count, arena.page_bytes) == (6, 2 * 2 * 4 * 2 * 16 * 4)
    with mmap.mmap(arena.fd, arena.count * arena.page_bytes) as other:
        assert other[:] == bytes(len(other))
        kv.tensor[5, 1, 1, 3, 1, 15] = 1.5
        assert np.frombuffer(other[-4:], np.float32)[0] == 1.5
        other[:4] = np.float32(2.5).tobytes()
    assert kv.tensor[0, 0, 0, 0, 0, 0] == 2.5
    assert arena.pages[5].view(np.float32)[-1] == 1.5


def test_the_fd_does_not_survive_exec_and_close_keeps_the_memory(tiny: Path) -> None:
    kv = pool(tiny)
    fd = kv.arena.fd
    assert fd is not None
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    kv.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    kv.tensor.fill_(1.0)
    assert kv.tensor.sum() == kv.tensor.numel()


def test_what_is_written_by_slot_is_gathered_by_page(tiny: Path) -> None:
    kv = pool(tiny)
    table, layer = np.array([[4, 1, 3]]), 1
    positions = np.arange(10)
    slots = torch.from_numpy(kv.slot_index(table[0][positions // 4], positions % 4))
    new = torch.randn(10, 2, 2, 16)
    kv.write(layer, slots, new)
    k, v = kv.gather(layer, torch.from_numpy(kv.half_index(table)), 1)
    assert torch.equal(k[0, :10], new[:, 0])
    assert torch.equal(v[0, :10], new[:, 1])
    assert torch.equal(kv.tensor[1, layer, 1, 2], new[6, 1])
    assert not k[0, 10:].any()
    assert not kv.tensor[:, 0].any()
    assert not kv.tensor[[0, 2, 5]].any()


def test_the_shared_file_can_neither_shrink_nor_grow_under_a_mover(tiny: Path) -> None:
    fd = pool(tiny).arena.fd
    assert fd is not None
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_clearing_a_page_leaves_its_neighbours(tiny: Path) -> None:
    kv = pool(tiny)
    kv.tensor.fill_(float("nan"))
    kv.clear(torch.tensor([2]))
    assert not kv.tensor[2].any()
    assert kv.tensor[[0, 1, 3, 4, 5]].isnan().all()


def test_an_empty_pool_and_an_unknown_dtype_are_refused(tiny: Path) -> None:
    with pytest.raises(EngineError, match="0 pages"):
        pool(tiny, pages=0)
    with pytest.raises(EngineError, match="float8"):
        KVPool(read_config(tiny), pages=1, page_size=1, dtype="float8", device=torch.device("cpu"))
