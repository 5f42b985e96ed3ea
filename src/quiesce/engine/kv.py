"""The paged KV pool: one run of equally sized pages, each holding all layers of `page_size` tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from quiesce.engine.config import ModelConfig, dtype_of
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu.mirror import Mirror
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena

Staging = Literal["none", "source", "target"]


class KVPool:
    """`tensor` is [pages, layers, 2 (k, v), page_size, kv_heads, head_dim], zero at first.

    On the CPU the memory is an anonymous shared file, so that a transport can hand its `fd` to another
    process; it is mapped here for as long as any tensor refers to it, and `close` gives up only the fd.

    On a device, and on the CPU where `apart`, it is memory of the engine's own with one page more: `scratch`, a page
    that no allocator knows. With `staging` transports move a mirror of the pages in host memory: a `source` copies
    what a step wrote to it before the step ends, a `target` what arrived in it before it is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page_size: int,
        dtype: str,
        device: torch.device,
        staging: Staging = "none",
        apart: bool = False,
    ) -> None:
        if pages <= 0 or page_size <= 0:
            raise EngineError(f"a KV pool of {pages} pages of {page_size} tokens cannot hold anything")
        page_bytes = config.page_bytes(dtype, page_size)
        self.pages, self.page_size, self.layers = pages, page_size, config.layers
        self.staging, self.scratch = staging, pages
        self.mirror: Mirror | None = None
        self._arena: Arena | None = None
        self._device = device
        if device.type == "cpu" and not apart:
            self._arena = _shared(pages, page_bytes)
            memory = torch.from_numpy(self._arena.pages)
        else:
            memory = _own(pages + 1, page_bytes, device)
            if staging != "none":
                self._arena = _shared(pages, page_bytes)
                self.mirror = Mirror(memory, self._arena)
        there = memory.shape[0]
        self.tensor = (
            memory.view(-1)
            .view(dtype_of(dtype))
            .view(there, config.layers, 2, page_size, config.kv_heads, config.head_dim)
        )
        self._by_page = self.tensor.view(there, -1)
        # one row per (page, layer, k or v), and one row per (page, layer, k or v, slot)
        self._by_half = self.tensor.view(there * config.layers * 2, -1)
        self._by_slot = self.tensor.view(there * config.layers * 2 * page_size, -1)

    @property
    def arena(self) -> Arena:
        """The pool's bytes, page by page, in host memory: the pool itself, or its mirror."""
        if self._arena is None:
            raise EngineError("this KV pool is in device memory and has no mirror that a transport could move")
        return self._arena

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all pages, by strides: each [pages, page_size, kv_heads, head_dim]."""
        return self.tensor[:, layer, 0], self.tensor[:, layer, 1]

    def fetch(self, pages: Sequence[int]) -> None:
        """Before pages that were landed are read. On a device: queued before whatever is computed after."""
        if self.mirror is not None and self.staging == "target":
            self.mirror.fetch(pages)

    def publish(self, pages: Sequence[int]) -> None:
        """After pages were written, before anything is told of them. Complete after `finish`."""
        if self.mirror is not None and self.staging == "source":
            self.mirror.publish(pages)

    def finish(self) -> None:
        """Returns when nothing that was asked of the device is still under way (guards L1 and D2)."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def close(self) -> None:
        """Close the shared file's descriptor. The memory itself goes with its last user."""
        if self._arena is not None and self._arena.fd is not None:
            os.close(self._arena.fd)
            self._arena.fd = None

    def copy(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Whole pages, one after the other; no step may be under way on either. It is over when this returns."""
        try:
            for theirs, ours in zip(source, destination, strict=True):
                self._by_page[ours].copy_(self._by_page[theirs])
            self.publish(destination)
        finally:
            self.finish()

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


def _own(pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        size = f"{pages} KV pages ({pages * page_bytes >> 20} MiB)"
        raise EngineError(f"cannot allocate {size} on {device}: {str(error).partition('. ')[0]}") from None


def _shared(pages: int, page_bytes: int) -> Arena:
    try:
        return shared_arena(pages, page_bytes)
    except OSError as error:
        size = f"{pages} KV pages ({pages * page_bytes >> 20} MiB)"
        raise EngineError(f"cannot allocate {size} of shared memory: {error}") from None
