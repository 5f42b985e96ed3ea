"""Packed products of every native level that this CPU can run, against fp64, and row by row against themselves."""

import ctypes
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.engine.native.library import (
    BFLOAT16,
    FLOAT32,
    INT4,
    INT8,
    INT8_OF_BF16,
    Library,
    levels,
    load,
    supported,
)
from quiesce.engine.quantize import exactly, int4, int8

KINDS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "int8": INT8,
    "int8 of bfloat16": INT8_OF_BF16,
    "int4": INT4,
}
ALLOWED = 2e-6  # relative to the norms of a row and a column
ALLOWED_WHOLE = 6e-5  # int8 in bfloat16's place, where activations are whole numbers of 15 bits and a sign: int8.h


def address(array: np.ndarray | torch.Tensor) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def allowed(level: str, dtype: str) -> float:
    return ALLOWED_WHOLE if (level, dtype) == ("avx2", "int8 of bfloat16") else ALLOWED


class Packed:
    """A random matrix [n, depth] with a bias, as the library has it and as it is."""

    def __init__(self, library: Library, dtype: str, n: int, depth: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        exact = torch.randn((n, depth), generator=draw)
        bias = torch.randn(n, generator=draw)
        self.library, self.kind, self.n, self.depth = library, KINDS[dtype], n, depth
        scale = None
        if dtype.startswith("int"):
            values, scale = (int8 if dtype.startswith("int8") else int4)(exact)
            exact = exactly(values, scale)
        else:
            values = exact.to(getattr(torch, dtype))
            exact = values.float()
        size = library.packed_bytes(self.kind, n, depth)
        self.memory = np.full(size + 64, 0xFF, np.uint8)  # bytes that are no numbers: all must be written
        place = address(self.memory) // 64 * 64 + 64
        scales = None if scale is None else address(scale)
        library.pack(self.kind, address(values), scales, address(bias), n, depth, place)
        self.place, self.matrix, self.bias = place, exact.double().numpy(), bias.double().numpy()

    def times(self, x: np.ndarray) -> np.ndarray:
        out = np.full((len(x), self.n), np.nan, np.float32)
        x = np.ascontiguousarray(x)
        self.library.product(self.kind, address(x), len(x), self.place, self.n, self.depth, address(out))
        return out


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_what_this_cpu_can_run_was_built() -> None:
    """Else the tests of levels below would pass for want of any."""
    assert levels() == list(supported())
    assert "base" in levels()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", list(KINDS))
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 210), depth=st.integers(1, 150), rows=st.integers(1, 70), seed=st.integers(0, 9))
def test_products_of_any_size_are_right(level: str, dtype: str, n: int, depth: int, rows: int, seed: int) -> None:
    packed = Packed(load(level), dtype, n, depth, seed)
    x = np.random.default_rng(seed).standard_normal((rows, depth), np.float32)
    if "bfloat16" in dtype:
        x = (
            torch.from_numpy(x).bfloat16().float().numpy()
        )  # what activations are kept as, where products are of pairs
    want = x.astype(np.float64) @ packed.matrix.T + packed.bias
    scale = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(packed.matrix, axis=1)) + 1
    assert (np.abs(packed.times(x) - want) / scale).max() < allowed(level, dtype)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", list(KINDS))
def test_a_row_has_the_same_bits_in_any_company(level: str, dtype: str) -> None:
    packed = Packed(load(level), dtype, 101, 97, seed=1)
    x = np.random.default_rng(1).standard_normal((70, 97), np.float32)
    whole = packed.times(x)
    for rows in range(1, 70):
        assert np.array_equal(packed.times(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("depth", [383, 385, 769, 1153])
def test_deep_and_tall_products_are_right_and_the_same_in_any_company(level: str, dtype: str, depth: int) -> None:
    """Deeper, and of more rows, than what is kept in caches at a time, and not by a multiple."""
    packed = Packed(load(level), dtype, 55, depth, seed=3)
    x = torch.randn((101, depth), generator=torch.Generator().manual_seed(4)).bfloat16().float().numpy()
    whole = packed.times(x)
    want = x.astype(np.float64) @ packed.matrix.T + packed.bias
    scale = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(packed.matrix, axis=1)) + 1
    assert (np.abs(whole - want) / scale).max() < allowed(level, dtype)
    for first, rows in [(0, 1), (100, 1), (45, 3), (44, 9), (1, 48), (47, 49), (2, 97)]:
        assert np.array_equal(packed.times(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("level", levels())
def test_nothing_is_written_past_the_result(level: str) -> None:
    packed = Packed(load(level), "float32", 5, 7, seed=2)
    room = (ctypes.c_float * 64)(*[7.5] * 64)
    x = np.ones((3, 7), np.float32)
    packed.library.product(packed.kind, address(x), 3, packed.place, 5, 7, ctypes.addressof(room))
    assert list(room)[15:] == [7.5] * 49


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 96])
def test_what_is_not_finite_is_not_lost(level: str, dtype: str, bad: float, at: int) -> None:
    """Not even where activations become whole numbers, none of which stands for it."""
    packed = Packed(load(level), dtype, 30, 97, seed=5)
    x = np.ones((6, 97), np.float32)
    x[2, at] = x[5, at] = bad
    for first in (0, 2):
        found = packed.times(x[first : first + 1] if first else x)
        assert not np.isfinite(found[0 if first else 2]).any()
    assert np.isfinite(packed.times(x)[[0, 1, 3, 4]]).all()


@pytest.mark.parametrize("level", levels())
def test_tiny_and_huge_activations_beside_int8(level: str) -> None:
    """The powers of two that whole numbers have in common stay within a float's."""
    packed = Packed(load(level), "int8 of bfloat16", 26, 200, seed=6)
    x = torch.randn((4, 200), generator=torch.Generator().manual_seed(7))
    x[0], x[1] = 0, 1e-38
    x[2] *= 1e15
    x[3, :64] *= 1e4
    x = x.bfloat16().float().numpy()
    whole = x.astype(np.float64) @ packed.matrix.T + packed.bias
    scale = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(packed.matrix, axis=1)) + 1
    found = packed.times(x)
    assert (np.abs(found - whole) / scale).max() < allowed(level, "int8 of bfloat16")
    assert np.array_equal(found[0], packed.bias.astype(np.float32))
    assert np.allclose(found[1], packed.bias, rtol=1e-6)
