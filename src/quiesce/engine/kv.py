"""The paged KV pool: one run of equally sized pages, each holding all layers of `page_size` tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from quiesce.engine.config import ModelConfig, dtype_of
from quiesce.engine.errors import EngineError
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena


class KVPool:
    """`tensor` is [pages, layers, 2 (k, v), page_size, kv_heads, head_dim], zero at first.

    On the CPU the memory is an anonymous shared file, so that a transport can hand its `fd` to another
    process; it is mapped here for as long as any tensor refers to it, and `close` gives up only the fd.
    """

    def __init__(self, config: ModelConfig, *, pages: int, page_size: int, dtype: str, device: torch.device) -> None:
        if pages <= 0 or page_size <= 0:
            raise EngineError(f"a KV pool of {pages} pages of {page_size} tokens cannot hold anything")
        shape = (pages, config.layers, 2, page_size, config.kv_heads, config.head_dim)
        page_bytes = config.page_bytes(dtype, page_size)
        self.pages, self.page_size, self.layers = pages, page_size, config.layers
        self._arena: Arena | None = None
        if device.type == "cpu":
            try:
                self._arena = shared_arena(pages, page_bytes)
            except OSError as error:
                size = f"{pages} KV pages ({pages * page_bytes >> 20} MiB)"
                raise EngineError(f"cannot allocate {size} of shared memory: {error}") from None
            memory = torch.from_numpy(self._arena.pages)
        else:
            memory = torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device)
        self.tensor = memory.view(-1).view(dtype_of(dtype)).view(shape)
        self._by_page = memory.view(-1).view(dtype_of(dtype)).view(pages, -1)
        # one row per (page, layer, k or v), and one row per (page, layer, k or v, slot)
        self._by_half = self.tensor.view(pages * config.layers * 2, -1)
        self._by_slot = self.tensor.view(pages * config.layers * 2 * page_size, -1)

    @property
    def arena(self) -> Arena:
        """The pool's bytes, page by page, in host memory."""
        if self._arena is None:
            raise EngineError("this KV pool is in device memory and cannot be shared as host pages")
        return self._arena

    def close(self) -> None:
        """Close the shared file's descriptor. The memory itself goes with its last user."""
        if self._arena is not None and self._arena.fd is not None:
            os.close(self._arena.fd)
            self._arena.fd = None

    def copy(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Whole pages, one after the other; no step may be under way on either."""
        for theirs, ours in zip(source, destination, strict=True):
            self._by_page[ours].copy_(self._by_page[theirs])

    def clear(self, pages: torch.Tensor) -> None:
        """Zero whole pages (int64 ids): nothing of an earlier owner, not even a NaN, is left in free slots."""
        self._by_page.index_fill_(0, pages, 0)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [n, 2, kv_heads, head_dim] at `slots` [n, 2] (from `slot_index`)."""
        at = slots.view(-1) + layer * 2 * self.page_size
        self._by_slot.index_copy_(0, at, kv.reshape(at.shape[0], -1))

    def gather(self, layer: int, halves: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V, each [rows, tokens, kv_heads, head_dim], for `halves` (from `half_index`)."""
        out = self._by_half.index_select(0, halves + layer * 2)
        kv = out.view(2, rows, -1, *self.tensor.shape[4:])
        return kv[0], kv[1]

    def slot_index(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Row numbers [n, 2] in layer 0 for the K and V of slot `slots[i]` of page `pages[i]`."""
        k = pages * (self.layers * 2 * self.page_size) + slots
        return np.stack((k, k + self.page_size), axis=1)

    def half_index(self, tables: np.ndarray) -> np.ndarray:
        """Row numbers in layer 0 of the K and then the V halves of page `tables` [rows, pages]."""
        k = tables.reshape(-1) * (self.layers * 2)
        return np.concatenate((k, k + 1))
