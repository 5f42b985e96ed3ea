"""Packed matrices give what plain ones give."""

import pytest
import torch
import torch.nn.functional as F

from quiesce.engine.engine import Engine
from quiesce.engine.model import Model, rows_that_differ
from quiesce.engine.product import pack, packable, packed, product
from quiesce.engine.weights import LayerWeights, Weights

SUPPORTED = [dtype for dtype in (torch.float32, torch.bfloat16) if packable(torch.empty(1, dtype=dtype))]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("rows", [1, 3, 8, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_equals_the_plain_one(dtype: torch.dtype, rows: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(rows)
    matrix = torch.randn((48, 40), generator=draw).to(dtype)
    added = torch.randn(48, generator=draw).to(dtype) if bias else None
    x = torch.randn((rows, 80), generator=draw).to(dtype)[:, ::2]  # not contiguous
    laid_out = packed(matrix)
    assert laid_out.is_mkldnn
    torch.testing.assert_close(
        product(x, laid_out, added), F.linear(x, matrix, added), rtol=CLOSE[dtype], atol=CLOSE[dtype]
    )


def test_packing_leaves_a_tied_embedding_to_be_read_by_row() -> None:
    square = torch.randn(8, 8)
    layer = LayerWeights(square[0], square, None, None, None, square, None, square[0], square, square)
    weights = Weights(square, [layer], square[0], square)
    pack(weights)
    assert torch.equal(F.embedding(torch.tensor([3]), weights.embedding), square[3:4])
    if SUPPORTED:
        assert all(matrix.is_mkldnn for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down, weights.head))


def test_deterministic_engines_use_matrices_that_round_a_row_the_same_in_any_batch(
    plain_exact_engine: Engine,
) -> None:
    assert isinstance(plain_exact_engine._model, Model)
    for matrix, bias in plain_exact_engine._model.weights.products():
        assert rows_that_differ(matrix, torch.empty(matrix.shape), bias) is None
