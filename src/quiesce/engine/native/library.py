"""Finds the build of the native step that this CPU can run, and calls it. ctypes gives up the GIL for every call."""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quiesce.engine.errors import EngineError

VARIABLE = "QUIESCE_NATIVE_LEVEL"
AUTO, OFF = "auto", "off"
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "bmi2")
# Best first, with the CPU flags each needs; base is whatever every CPU of the architecture has (SSE2, NEON).
LEVELS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*AVX512, "avx512_bf16"),
    "avx512": AVX512,
    "avx2": ("avx2", "fma", "bmi2"),
    "base": (),
}
FOLDER = Path(__file__).parent
# int8 weights: with activations in float32, in bfloat16 (or finer: int8.h); int4: always in float32.
FLOAT32, BFLOAT16, INT8, INT8_OF_BF16, INT4 = range(5)


NUMBERS = ("hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "vocab", "page_size", "threads")


class Layer(Structure):
    """As in step.cpp. Addresses: norms float32, matrices packed; q_norm and k_norm may be None."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "qkv", "out", "gate_up", "down")
    )


class Model(Structure):
    """As in step.cpp. Rotary tables are float32 [positions, head_dim / 2]."""

    _fields_ = (
        *((name, c_int64) for name in NUMBERS),
        ("weights", c_int32),
        ("cache", c_int32),
        ("eps", c_float),
        ("layer", POINTER(Layer)),
        *((name, c_void_p) for name in ("norm", "cosines", "sines", "embedding", "head")),
    )


class Seats(Structure):
    """As in seats.h. Addresses of what `engine/seats.py` keeps for every seat."""

    _fields_ = (
        *((name, c_int64) for name in ("count", "page_size")),
        *((name, c_void_p) for name in ("tokens", "rows", "held", "seeds", "wishes", "pages")),
    )


class Bounds(Structure):
    """As in seats.h: what tokens, positions and pages must be below."""

    _fields_ = tuple((name, c_int64) for name in ("vocab", "context", "pages"))


UNDER = 64  # logits under a peak, as in peaks.h
ROW_FIELDS = 3  # count, start, table: int64
ABI = 5000000 + ctypes.sizeof(Model) * 1000 + ctypes.sizeof(Layer) + 8 * ROW_FIELDS + ctypes.sizeof(Seats)

# As in sampling.h. A temperature of 0 is greedy; `chance` is uniform in [0, 1).
WISH = np.dtype(
    [(name, "f8") for name in ("temperature", "top_p", "min_p", "chance")]
    + [(name, "i8") for name in ("top_k", "masked", "token")]
)

BEST = np.dtype([("value", "f4"), ("token", "i4")])  # as in peaks.h: the largest of a row, and the first that has it


class Peaks(NamedTuple):
    """Of rows of logits: the largest of each block, NaN for one that is not finite, and the best of all."""

    blocks: np.ndarray  # float32 [rows, blocks of the vocabulary]
    bests: np.ndarray  # BEST [rows]

    def behind(self, rows: int) -> Peaks:
        """Without the first so many."""
        return Peaks(self.blocks[rows:], self.bests[rows:])


Address = int


@dataclass(frozen=True)
class Library:
    """One level's build. Kinds are those above; memory is given by address, row-major, unpadded."""

    level: str
    calls: Any

    def packed_bytes(self, kind: int, n: int, depth: int) -> int:
        return int(self.calls.quiesce_packed_bytes(kind, n, depth))

    def pack(
        self, kind: int, matrix: Address, scale: Address | None, bias: Address | None, n: int, depth: int, to: Address
    ) -> None:
        """`matrix` [n, depth] in `kind`, with scale and bias float32 [n], into `packed_bytes` at `to`.

        int4: a byte each, with scales [n, groups, 2], as quiesce.engine.quantize makes them."""
        self.calls.quiesce_pack(kind, matrix, scale, bias, n, depth, to)

    def product(self, kind: int, x: Address, rows: int, packed: Address, n: int, depth: int, out: Address) -> None:
        """`out` [rows, n] = `x` [rows, depth], both float32, times a packed matrix."""
        self.calls.quiesce_product(kind, x, rows, packed, n, depth, out)

    def open(self, model: Model) -> Address:
        stepper = self.calls.quiesce_open(byref(model))
        if not stepper:
            raise EngineError(f"the native step ({self.level}) got no memory or no {model.threads} threads")
        return int(stepper)

    def close(self, stepper: Address) -> None:
        self.calls.quiesce_close(stepper)

    def forward(
        self,
        stepper: Address,
        tokens: Address,
        rows: Address,
        count: int,
        needed: Address | None,
        pages: Address,
        pool: Address,
        to: Address,
    ) -> None:
        """Tokens and page tables int32; `count` rows of ROW_FIELDS int64; hidden states float32 to `to`: those of the
        last `needed` tokens of each row, int64, or of all."""
        if self.calls.quiesce_forward(stepper, tokens, rows, count, needed, pages, pool, to):
            raise EngineError(f"the native step ({self.level}) got no memory for this many tokens")

    def logits(self, stepper: Address, hidden: Address, rows: int, out: Address, apart: int, peaks: Peaks) -> None:
        if self.calls.quiesce_logits(
            stepper, hidden, rows, out, apart, peaks.blocks.ctypes.data, peaks.bests.ctypes.data
        ):
            raise EngineError(f"the native step ({self.level}) got no memory for this many tokens")

    def draw(self, logits: np.ndarray, wishes: np.ndarray, peaks: Peaks | None = None) -> None:
        """`logits` float32 [rows, vocab], each row together; `wishes` [rows] of WISH, whose `token` is filled in: -1
        for a row that is not finite (where `masked` is set, -inf is fine: a token that is not drawn). `peaks`: those
        that came with the logits; without them the logits are read once more."""
        known = (None, None) if peaks is None else (peaks.blocks.ctypes.data, peaks.bests.ctypes.data)
        if self.calls.quiesce_draw(logits.ctypes.data, *known, *logits.shape, wishes.ctypes.data):
            raise self._no_memory_to_draw(len(logits))

    def sound(self, seats: Seats, bounds: Bounds, others: np.ndarray) -> bool:
        """Whether every seat's token may be computed, and no two write one page, nor one of `others`, int64. Those
        and the pages of all tables are known to be within bounds."""
        return bool(self.calls.quiesce_sound(byref(seats), byref(bounds), others.ctypes.data, len(others)))

    def draw_seats(self, seats: Seats, logits: Address, peaks: Peaks, vocab: int) -> tuple[np.ndarray, bool]:
        """A token for each seat, whose rows are the first, int64, -1 for one that is not finite; whether all are."""
        tokens = np.empty(seats.count, np.int64)
        blocks, bests = peaks.blocks.ctypes.data, peaks.bests.ctypes.data
        outcome = self.calls.quiesce_draw_seats(byref(seats), logits, blocks, bests, vocab, tokens.ctypes.data)
        if outcome == 1:
            raise self._no_memory_to_draw(seats.count)
        return tokens, outcome == 0

    def _no_memory_to_draw(self, rows: int) -> EngineError:
        return EngineError(f"the native step ({self.level}) got no memory to draw from {rows} rows")

    def chances(self, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`sampler.uniform` of each uint64 seed and int64 position."""
        out = np.empty(len(seeds))
        seeds, positions = np.ascontiguousarray(seeds), np.ascontiguousarray(positions)
        self.calls.quiesce_chances(seeds.ctypes.data, positions.ctypes.data, len(seeds), out.ctypes.data)
        return out


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quiesce_abi": (c_int64, ()),
    "quiesce_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "quiesce_pack": (None, (c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "quiesce_product": (None, (c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "quiesce_open": (c_void_p, (POINTER(Model),)),
    "quiesce_close": (None, (c_void_p,)),
    "quiesce_forward": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, *(c_void_p,) * 4)),
    "quiesce_logits": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p)),
    "quiesce_chances": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "quiesce_draw": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "quiesce_sound": (c_int32, (POINTER(Seats), POINTER(Bounds), c_void_p, c_int64)),
    "quiesce_draw_seats": (c_int32, (POINTER(Seats), c_void_p, c_void_p, c_void_p, c_int64, c_void_p)),
}


def choose(wanted: str, device: str) -> tuple[Library | None, str]:
    """The library to run, or None for the plain step, and why, for people.

    `wanted` is a level, "off" or "auto": what the environment says, else the best level that was built and that
    this CPU has. Raises EngineError for a level that cannot be had.
    """
    if wanted == AUTO:
        wanted = os.environ.get(VARIABLE) or AUTO
    if wanted not in (AUTO, OFF, *LEVELS):
        raise EngineError(f"native level {wanted!r} is none of {', '.join((AUTO, OFF, *LEVELS))}")
    if device != "cpu":
        if wanted in LEVELS:
            raise EngineError(f"native level {wanted} runs on the CPU, not on {device}")
        return None, f"plain PyTorch: the native step runs on the CPU, not on {device}"
    if wanted == OFF:
        return None, "plain PyTorch: the native step is off"
    runnable = levels()
    if wanted in LEVELS:
        if wanted not in runnable:
            missing = "was not built" if wanted in supported() else "needs what this CPU does not have"
            raise EngineError(f"native level {wanted} {missing}; there are: {', '.join(runnable) or 'none'}")
        return load(wanted), f"native {wanted}, as asked"
    if not runnable:
        return None, (
            "plain PyTorch, several times slower: the native step was not built. Install a C++ compiler"
            " (Debian, Ubuntu: apt install g++) and install Quiesce again"
        )
    return load(runnable[0]), f"native {runnable[0]}"


def levels() -> list[str]:
    """The levels that were built and that this CPU can run, best first."""
    return [level for level in supported() if _path(level).is_file()]


@cache
def supported() -> tuple[str, ...]:
    """The levels that this CPU can run, built or not."""
    flags: set[str] = set()
    if platform.machine() in ("x86_64", "AMD64"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return tuple(level for level, needed in LEVELS.items() if flags.issuperset(needed))


@cache
def load(level: str) -> Library:
    """Raises EngineError for a file that is no library of this version."""
    try:
        calls = ctypes.CDLL(str(_path(level)))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(calls, name)
            function.restype, function.argtypes = result, arguments
        fits = calls.quiesce_abi() == ABI
    except (OSError, AttributeError) as error:
        raise EngineError(f"{_path(level)} cannot be loaded: {error}; install Quiesce again") from None
    if not fits:
        raise EngineError(f"{_path(level)} belongs to another version of Quiesce; install Quiesce again")
    return Library(level, calls)


def _path(level: str) -> Path:
    return FOLDER / f"_{level}.so"
