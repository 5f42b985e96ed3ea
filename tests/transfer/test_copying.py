"""The mover's copy, native and plain: what is listed, in order, to the byte, and nothing beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quiesce.transfer import copying

COPIES = {"plain": copying.plain, "native": copying.choose()[0]}


def numbers(pages: list[int]) -> bytes:
    return np.array(pages, np.int32).tobytes()


def test_the_native_copy_was_built() -> None:
    copy, name, slower = copying.choose()
    assert (copy is not copying.plain, name, slower) == (True, copying.NATIVE, ""), slower


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("page_bytes", [1, 15, 64, 100, 4096, 23 << 10, (23 << 10) + 9])
@pytest.mark.parametrize("off", [0, 1, 16])  # of the pool's address
def test_what_is_listed_lands_and_nothing_beside_it(how: str, page_bytes: int, off: int) -> None:
    draw = random.Random(page_bytes)
    count, room = 40, 40 * page_bytes
    source = np.frombuffer(draw.randbytes(room), np.uint8).reshape(count, page_bytes)
    memory = np.full(room + 64, 0xEE, np.uint8)
    target = memory[off : off + room].reshape(count, page_bytes)
    src, dst = draw.choices(range(count), k=25), draw.sample(range(count), 25)
    COPIES[how](copying.Pool(target), copying.Pool(source), numbers(dst), numbers(src))
    expected = np.full(room + 64, 0xEE, np.uint8)
    expected[off : off + room].reshape(count, page_bytes)[dst] = source[src]
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("how", COPIES)
def test_of_two_copies_into_one_page_the_later_stays(how: str) -> None:
    source, target = (np.zeros((3, 4096), np.uint8) for _ in range(2))
    source[:] = np.arange(3)[:, None]
    COPIES[how](copying.Pool(target), copying.Pool(source), numbers([1, 1, 1]), numbers([2, 0, 1]))
    assert (target[1] == 1).all() and not target[0].any() and not target[2].any()


@pytest.mark.parametrize("pages, beyond", [([0, 7], 7), ([3], 3), ([0, -1], 2**32 - 1), ([-(2**31)], 2**31)])
def test_a_page_below_the_pool_counts_as_beyond_it(pages: list[int], beyond: int) -> None:
    assert copying.highest(numbers(pages)) == beyond
