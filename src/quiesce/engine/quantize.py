"""Weight-only int8 and int4.

int8: each row of a matrix, which is one output channel, as whole numbers with a scale of its own. int4: each weight
as one of sixteen steps from the least of its GROUP, neighbours in a row; 5 bits a weight in all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quiesce.engine.weights import Weights

LARGEST = 127
GROUP, STEPS = 32, 15  # as in native/int4.h
QUANTIZATIONS = ("none", "int8", "int4")


def int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matrix` [out, in] as int8 [out, in] and float32 scales [out]: values times scale, to the nearest."""
    exact = matrix.float()
    scale = exact.abs().amax(1).div_(LARGEST)
    steps = torch.where(scale > 0, scale, 1.0)  # a row of zeros
    return exact.div(steps[:, None]).round_().to(torch.int8), scale


def int4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matrix` [out, in] as uint8 [out, in] of 0 to 15, and float32 [out, groups, 2]: the step and the least of each
    group, both rounded to bfloat16. A weight is step times value plus least, to the nearest."""
    rows, depth = matrix.shape
    exact = F.pad(matrix.float(), (0, -depth % GROUP), mode="replicate").view(
        rows, -1, GROUP
    )  # the last group is short
    least, most = exact.amin(2), exact.amax(2)
    step = ((most - least) / STEPS).bfloat16().float()
    least = least.bfloat16().float()
    values = (exact - least[..., None]).div_(torch.where(step > 0, step, 1.0)[..., None]).round_().clamp_(0, STEPS)
    return values.to(torch.uint8).view(rows, -1)[:, :depth].contiguous(), torch.stack([step, least], 2)


def exactly(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers, float32, that `int8` or `int4` gave as these two."""
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    step, least = scales.repeat_interleave(GROUP, 1)[:, : values.shape[1]].unbind(2)
    return values.float() * step + least  # rounded once: four bits times eight are no more than a float holds


def round_to(quantization: str, weights: Weights) -> None:
    """Replace every matrix of a step by what is left of it, in its own dtype: the reference for the native step.

    The embedding is looked up, not multiplied with, and stays; a head that is tied to it becomes its own matrix.
    """
    made = {"int8": int8, "int4": int4}[quantization]

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        return exactly(*made(matrix)).to(matrix.dtype)

    for layer in weights.layers:
        layer.qkv, layer.out = rounded(layer.qkv), rounded(layer.out)
        layer.gate_up, layer.down = rounded(layer.gate_up), rounded(layer.down)
    weights.head = rounded(weights.head)
