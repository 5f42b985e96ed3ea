"""Weight-only int8: each row of a matrix, which is one output channel, as whole numbers with a scale of its own."""

from __future__ import annotations

import torch

from quiesce.engine.weights import Weights

LARGEST = 127


def int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matrix` [out, in] as int8 [out, in] and float32 scales [out]: values times scale, to the nearest."""
    exact = matrix.float()
    scale = exact.abs().amax(1).div_(LARGEST)
    steps = torch.where(scale > 0, scale, 1.0)  # a row of zeros
    return exact.div(steps[:, None]).round_().to(torch.int8), scale


def round_to_int8(weights: Weights) -> None:
    """Replace every matrix of a step by what int8 leaves of it, in its own dtype: the reference for the native step.

    The embedding is looked up, not multiplied with, and stays; a head that is tied to it becomes its own matrix.
    """
    for layer in weights.layers:
        layer.qkv, layer.out = _rounded(layer.qkv), _rounded(layer.out)
        layer.gate_up, layer.down = _rounded(layer.gate_up), _rounded(layer.down)
    weights.head = _rounded(weights.head)


def _rounded(matrix: torch.Tensor) -> torch.Tensor:
    values, scale = int8(matrix)
    return (values.float() * scale[:, None]).to(matrix.dtype)
