"""The decode step as CUDA graphs: one for each of a few batch sizes, over buffers that stay where they are.

A batch is padded to the next size. Padding rows are one token each at position 0 of the pool's scratch page, which is
no page of any allocator: nothing that they read or write belongs to a request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quiesce.engine.batch import Batch
from quiesce.engine.gpu.segments import Segment
from quiesce.engine.kv import KVPool

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
Forward = Callable[[Batch], torch.Tensor]


class Recorder(Protocol):
    """`record` runs `work` at least once and returns its output, whose memory stays, and what runs it again."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]: ...


def on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels that are not PyTorch's own run on the thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class CudaRecorder:
    """One memory pool for all graphs: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside of the recording
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        return out, graph.replay


@dataclass(frozen=True)
class Buffers:
    """What all graphs read, for the largest size."""

    tokens: torch.Tensor  # int64 [rows]
    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows, 2]
    tables: torch.Tensor  # int32 [rows, pages of the longest context]
    ends: torch.Tensor  # int32 [rows]
    offsets: torch.Tensor  # int32 [rows + 1]: 0, 1, 2 ...


class DecodeGraphs:
    """`forward` is `Model.forward` short of clearing pages. `sizes` are recorded at once, largest first, so that the
    small ones fit into what the large one took."""

    def __init__(
        self, forward: Forward, kv: KVPool, *, context_length: int, recorder: Recorder, sizes: tuple[int, ...] = SIZES
    ) -> None:
        """Raises ValueError for a pool without a scratch page, and whatever recording raises."""
        if kv.tensor.shape[0] != kv.pages + 1:
            raise ValueError("graphs need a pool with a scratch page of its own")
        self.sizes = tuple(sorted(sizes))
        self._kv, rows, device = kv, self.sizes[-1], kv.tensor.device
        self._width = -(-context_length // kv.page_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffers = Buffers(
            tokens=zeros(rows),
            positions=zeros(rows),
            slots=zeros(rows, 2),
            tables=zeros(rows, self._width, dtype=torch.int32),
            ends=zeros(rows, dtype=torch.int32),
            offsets=torch.arange(rows + 1, dtype=torch.int32, device=device),
        )
        at = kv.slot_index(np.array([kv.scratch]), np.array([0]))
        self._nobody = torch.from_numpy(at[0]).to(device)  # slot 0 of the scratch page
        self.replays = 0
        self._graphs: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}
        self._pad(0, rows)
        for size in reversed(self.sizes):
            batch = self._batch(size)
            self._graphs[size] = recorder.record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def size_of(self, batch: Batch) -> int | None:
        """The padded size, None where the batch is not for a graph: prompts in it, or too many rows."""
        if len(batch.segments) != 1 or batch.segments[0].longest != 1:
            return None
        return next((size for size in self.sizes if size >= batch.n), None)

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states [n, hidden] that stand until the next call; None where the batch is not for a graph."""
        size = self.size_of(batch)
        if size is None:
            return None
        self._load(batch)
        self._pad(batch.n, size)
        out, replay = self._graphs[size]
        replay()
        self.replays += 1
        return out[: batch.n]

    def _load(self, batch: Batch) -> None:
        n, segment, buffers = batch.n, batch.segments[0], self.buffers
        buffers.tokens[:n].copy_(batch.tokens[:n])
        buffers.positions[:n].copy_(batch.positions[:n])
        buffers.slots[:n].copy_(batch.slots)
        buffers.tables[:n, : segment.tables.shape[1]].copy_(segment.tables)
        buffers.ends[:n].copy_(segment.ends)

    def _pad(self, first: int, last: int) -> None:
        """Rows first..last are nobody's. A padding row reads one key, at its first page: the rest of its table, which
        an earlier row may have left, is never looked at."""
        buffers = self.buffers
        buffers.tokens[first:last] = 0
        buffers.positions[first:last] = 0
        buffers.slots[first:last] = self._nobody
        buffers.tables[first:last, 0] = self._kv.scratch
        buffers.ends[first:last] = 1

    def _batch(self, size: int) -> Batch:
        """Over the buffers themselves, so that what is recorded reads whatever they hold then."""
        buffers = self.buffers
        nothing = np.empty(0, np.int32)
        segment = Segment(
            *(0, size, buffers.tables[:size], buffers.ends[:size], buffers.offsets[: size + 1], 1),
            host=(nothing, nothing, nothing),
        )
        return Batch(
            n=size,
            tokens=buffers.tokens[:size],
            positions=buffers.positions[:size],
            slots=buffers.slots[:size],
            cleared=torch.empty(0, dtype=torch.int64, device=buffers.slots.device),
            groups=[],
            chunks=[],
            wanted=torch.empty(0, dtype=torch.int64, device=buffers.slots.device),
            samplers=[],
            firsts={},
            segments=[segment],
        )
