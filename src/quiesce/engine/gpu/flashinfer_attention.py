"""FlashInfer's paged attention, where it is installed: `pip install flashinfer-python`. Not run on a GPU so far.

Its wrappers are planned on the host once a step and called once a layer. K and V are handed over as two strided views
of the page-major pool, which it has accepted since 0.2.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from quiesce.engine.gpu.segments import Segment

WORKSPACE = 128 << 20  # bytes, as its documentation recommends
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # compiled for; others are not


class Unfit(Exception):
    """A backend cannot be used here; the text says why, after the backend's name."""


class FlashInferAttention:
    graphs = False  # its plan is made on the host, for the rows of the moment

    def __init__(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raises Unfit."""
        if device.type != "cuda":
            raise Unfit(f"runs on CUDA, not on {device.type}")
        if dtype not in DTYPES or head_dim not in HEAD_DIMS:
            raise Unfit(f"has no kernel for {dtype} and a head dimension of {head_dim}")
        library = _library()
        self.name = f"FlashInfer {getattr(library, '__version__', '(version unknown)')}"
        self._dtype, self._device = dtype, device

        def workspace() -> torch.Tensor:
            return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)

        self._singles = library.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True)
        self._prompts = library.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
        self._shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # query heads, KV heads, head dimension, page size

    def shape(self, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
        """Of the model; before the first `plan`."""
        self._shape = heads, kv_heads, head_dim, page_size

    def plan(self, segment: Segment) -> None:
        tables, ends, offsets = segment.host
        page_size = self._shape[3]
        used = -(-ends // page_size)
        begins = self._there(np.cumsum([0, *used]))
        pages = self._there(np.concatenate([line[:count] for line, count in zip(tables, used, strict=True)]))
        last = self._there(ends - (used - 1) * page_size)
        kinds = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        if segment.longest == 1:
            self._singles.plan(begins, pages, last, *self._shape, **kinds)
        else:
            self._prompts.plan(self._there(offsets), begins, pages, last, *self._shape, causal=True, **kinds)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        wrapper = self._singles if segment.longest == 1 else self._prompts
        out: torch.Tensor = wrapper.run(q.flatten(1, 2).contiguous(), (k, v))
        return out.view(q.shape)

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self._device)


def _library() -> Any:
    try:
        return import_module("flashinfer")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "flashinfer"
        raise Unfit("is not installed" if missing else f"cannot be loaded: {error}") from error
