"""Matrix products on the CPU with weights laid out once as oneDNN reads them, instead of at every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quiesce.engine.weights import Weights

ROWS_HINT = 512  # the number of rows the layout is chosen for; measured, this one serves 1 row just as well


def pack(weights: Weights) -> None:
    """Replace the matrices by packed ones where this machine has the kernels; each plain one is dropped at once.

    A tied head becomes a matrix of its own, for the embedding is still read row by row.
    """
    if not packable(weights.embedding):
        return
    for layer in weights.layers:
        layer.qkv, layer.out = packed(layer.qkv), packed(layer.out)
        layer.gate_up, layer.down = packed(layer.gate_up), packed(layer.down)
    weights.head = packed(weights.head)


def product(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in] times `matrix` [out, in], plain or packed, plus `bias` [out] -> [n, out]."""
    if matrix.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")
        return out
    return F.linear(x, matrix, bias)


def packable(matrix: torch.Tensor) -> bool:
    """Whether this machine and build have the kernels for such a matrix."""
    if matrix.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return matrix.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` [out, in] in an opaque layout that only `product` can use."""
    laid_out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS_HINT)
    return laid_out
