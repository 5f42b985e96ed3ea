"""How a mover copies a page list: by the native copy where it was built, else page by page with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

BUILD = Path(__file__).parent / "native" / "_copy.so"
ABI = 1
_FEW_BYTES = 256  # up to which a plain look is the quicker one
NATIVE, PLAIN = "native", "numpy"


class Pool:
    """Pages of a pool, uint8 [pages, page_bytes], C-contiguous, with their address at hand."""

    def __init__(self, pages: np.ndarray) -> None:
        self.pages, self.address = pages, int(pages.ctypes.data)


Copy = Callable[[Pool, Pool, bytes, bytes], None]


@cache
def choose() -> tuple[Copy, str, str]:
    """The copy to use, its name, and for people why it is not the native one, which is a third faster; else "".

    A copy takes (target, source, dst, src): page numbers are native int32 arrays that its caller has checked. It
    copies source page src[i] to target page dst[i], in order."""
    try:
        calls = ctypes.CDLL(str(BUILD))
        copy = calls.quiesce_copy_pages
        copy.restype = None
        copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, *(ctypes.c_int64,) * 2)
        calls.quiesce_copy_abi.restype = ctypes.c_int64
        fits = calls.quiesce_copy_abi() == ABI
    except (OSError, AttributeError) as error:
        return plain, PLAIN, f"the native copy was not built ({error}): install a C++ compiler and Quiesce again"
    if not fits:
        return plain, PLAIN, f"{BUILD} belongs to another version of Quiesce: install Quiesce again"

    def native(target: Pool, source: Pool, dst: bytes, src: bytes) -> None:
        copy(target.address, source.address, dst, src, len(dst) // 4, target.pages.shape[1])

    return native, NATIVE, ""


def plain(target: Pool, source: Pool, dst: bytes, src: bytes) -> None:
    to, of = target.pages, source.pages
    for a, b in zip(np.frombuffer(src, np.int32).tolist(), np.frombuffer(dst, np.int32).tolist(), strict=True):
        to[b] = of[a]


def highest(numbers: bytes) -> int:
    """Of native int32 page numbers; a negative one counts as beyond any pool."""
    if len(numbers) <= _FEW_BYTES:
        return max(memoryview(numbers).cast("I"))
    return int(np.frombuffer(numbers, np.uint32).max())
