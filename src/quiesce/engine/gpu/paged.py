"""Paged attention over a pool in device memory: what a backend is, and the plain one."""

from __future__ import annotations

from typing import Protocol

import torch

from quiesce.engine import attention as gathered
from quiesce.engine.gpu.segments import Segment


class Attention(Protocol):
    """`graphs`: all that it does in `attend` may be held by a CUDA graph."""

    name: str
    graphs: bool

    def plan(self, segment: Segment) -> None:
        """Once a step, before the first layer's `attend` of this segment."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        """q [tokens, kv_heads, group, dim] of the segment's tokens, the last dimension contiguous and the two before
        it dense; k and v [pages, page_size, kv_heads, dim], one layer of the pool, by strides -> as q, contiguous.
        The keys of the new tokens are in their pages already."""


class TorchAttention:
    """Gathers each row's pages and takes PyTorch's attention: works anywhere, and copies all keys at each layer."""

    name = "PyTorch"
    graphs = False  # what it copies is as long as the rows of the moment

    def plan(self, segment: Segment) -> None:
        """Nothing is prepared."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        _, ends, offsets = segment.host
        if segment.longest == 1:
            keys, values = (x[segment.tables.long()].flatten(1, 2) for x in (k, v))
            hidden = torch.arange(keys.shape[1], device=q.device)[None, :] >= segment.ends[:, None]
            bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
            out[:] = gathered.decode(q, keys, values.masked_fill(hidden[..., None, None], 0), bias[:, None, None, :])
            return out
        for row, end in enumerate(ends.tolist()):
            first, last = int(offsets[row]), int(offsets[row + 1])
            pages = segment.tables[row, : -(-end // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:end] for x in (k, v))
            out[first:last] = gathered.prefill(q[first:last], keys, values, end - (last - first))
        return out
