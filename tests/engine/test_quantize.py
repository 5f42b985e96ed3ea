"""What int8 and int4 leave of a matrix, without an engine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quiesce.engine.quantize import GROUP, exactly, int4, int8


def matrix(rows: int, depth: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, depth), generator=torch.Generator().manual_seed(seed))


@given(rows=st.integers(1, 9), depth=st.integers(1, 200), seed=st.integers(0, 9))
def test_no_weight_is_further_off_than_half_a_step_and_what_rounding_the_step_costs(
    rows: int, depth: int, seed: int
) -> None:
    exact = matrix(rows, depth, seed) + seed
    values, scales = int4(exact)
    assert values.shape == exact.shape and values.dtype == torch.uint8 and int(values.max()) <= 15
    assert torch.equal(scales, scales.bfloat16().float()), "they are stored as bfloat16"
    for first in range(0, depth, GROUP):
        group, (step, least) = exact[:, first : first + GROUP], scales[:, first // GROUP].unbind(1)
        width = group.amax(1) - group.amin(1)
        lost = (exactly(values, scales)[:, first : first + GROUP] - group).abs().amax(1)
        # Half a step; the step and the least of it are off by 2^-9 of themselves, the step fifteen times.
        assert (lost <= step / 2 + (width + least.abs()) * 2**-8 + 1e-6).all()


def test_sixteen_levels_are_found_again() -> None:
    """Weights that were made of four bits stay what they were: nothing is lost twice."""
    draw = torch.Generator().manual_seed(1)
    step, least = torch.full((5, 4, 1), 0.25), torch.tensor([-3.5, -2.0, 0.0, 1.5]).view(1, 4, 1)
    values = torch.randint(0, 16, (5, 4, GROUP), generator=draw)
    values[..., 0], values[..., 1] = 0, 15
    exact = (values * step + least).view(5, -1)
    assert torch.equal(exactly(*int4(exact)), exact)


@pytest.mark.parametrize("made", [int8, int4])
def test_equal_weights_and_zeros_are_kept(made) -> None:
    for value in (0.0, 1.5, -2.0):
        assert torch.allclose(exactly(*made(torch.full((3, 40), value))), torch.full((3, 40), value))


def test_int4_is_coarser_than_int8() -> None:
    exact = matrix(64, 576)
    off = {made: float((exactly(*made(exact)) - exact).norm() / exact.norm()) for made in (int8, int4)}
    assert off[int8] < 0.02 < off[int4] < 0.12
