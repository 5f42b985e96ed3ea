"""The forward pass by the native library: weights packed once, then two calls a step."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from quiesce.engine.batch import Row
from quiesce.engine.config import ModelConfig
from quiesce.engine.kv import KVPool
from quiesce.engine.native import library
from quiesce.engine.native.decode_loop import DecodeLoop, calls
from quiesce.engine.native.library import Library, Peaks
from quiesce.engine.quantize import int4, int8
from quiesce.engine.rope import rotary
from quiesce.engine.seats import Seats
from quiesce.engine.weights import LayerWeights, Weights

KINDS = {torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16}
# What weights are kept as: by what is asked for and the dtype.
QUANTIZED = {
    ("int8", torch.float32): library.INT8,
    ("int8", torch.bfloat16): library.INT8_OF_BF16,
    ("int4", torch.float32): library.INT4,
    ("int4", torch.bfloat16): library.INT4,
}
MADE = {kind: {"int8": int8, "int4": int4}[asked] for (asked, _), kind in QUANTIZED.items()}
HUGE = 2 << 20  # weights are read from end to end at every step: on large pages, with fewer misses


@dataclass(frozen=True)
class Flat:
    """A step as the library takes it. `wanted` are the flat tokens whose logits are needed, those of all seats first;
    None: all of them."""

    tokens: np.ndarray  # int32
    rows: np.ndarray  # int64 [rows, ROW_FIELDS]
    needed: np.ndarray | None  # int64 [rows]: of how many tokens, from the row's end, the states are; None: of all
    pages: np.ndarray  # int32: all page tables, one after the other
    wanted: torch.Tensor | None
    samplers: list[int]  # the row each wanted token behind the seats' belongs to
    firsts: dict[int, int]  # row -> its first flat token


class NativeModel:
    """A token's bits depend on its own request alone, whatever else is in the batch: always deterministic."""

    def __init__(
        self,
        to: Library,
        config: ModelConfig,
        weights: Weights,
        *,
        quantization: str,
        context_length: int,
        page_size: int,
        threads: int,
    ) -> None:
        """Takes `weights` apart: each matrix is dropped as soon as it is packed."""
        self.config, self.library, self._page_size = config, to, page_size
        self._held: list[object] = []  # what the library has addresses of
        dtype = weights.embedding.dtype
        cache = KINDS[dtype]
        self._arena = _Arena(to, weights, cache if quantization == "none" else QUANTIZED[quantization, dtype])
        layers = (library.Layer * config.layers)(*(self._layer(layer) for layer in weights.layers))
        cosines, sines = rotary(config.rope, config.head_dim, context_length)
        described = library.Model(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            page_size=page_size,
            threads=threads,
            weights=self._arena.kind,
            cache=cache,
            eps=config.norm_eps,
            layer=layers,
            norm=self._hold(weights.norm.float()),
            cosines=self._hold(cosines),
            sines=self._hold(sines),
            embedding=self._hold(weights.embedding),
            head=self._arena.pack(weights.head, None),
        )
        stepper = to.open(described)
        self._stepper = stepper
        self._close = weakref.finalize(self, to.close, stepper)

    def plan(self, rows: Sequence[Row], kv: KVPool, seats: Seats | None = None) -> Flat:
        """Lay out checked rows, in their order, behind those that sit."""
        seated = 0 if seats is None else len(seats)
        if seats is not None and not rows:
            return Flat(seats.tokens.astype(np.int32), seats.described, None, seats.tables, None, [], {})
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        tables = [row.pages if type(row.pages) is array else array("i", row.pages) for row in rows]
        described = np.empty((len(rows), library.ROW_FIELDS), np.int64)
        described[:, 0] = counts
        described[:, 1] = [row.start for row in rows]
        described[:, 2] = np.cumsum([0, *map(len, tables)])[:-1]
        ends = np.cumsum(counts) + seated
        needed = np.array([len(row.tokens) if row.scored else row.sample is not None for row in rows], np.int64)
        samplers = [number for number, row in enumerate(rows) if row.sample is not None]
        tokens = np.fromiter(chain.from_iterable([row.tokens for row in rows]), np.int32, int(ends[-1]) - seated)
        pages = np.frombuffer(b"".join(tables), np.int32)
        if seats is not None:
            described[:, 2] += len(seats.tables)
            described = np.concatenate([seats.described, described])
            tokens = np.concatenate([seats.tokens.astype(np.int32), tokens])
            pages = np.concatenate([seats.tables, pages])
            needed = np.concatenate([np.ones(seated, np.int64), needed])
        return Flat(
            tokens=tokens,
            rows=described,
            needed=needed,
            pages=pages,
            wanted=torch.from_numpy(np.concatenate([np.arange(seated), ends[samplers] - 1])),
            samplers=samplers,
            firsts=dict(enumerate((ends - counts).tolist())),
        )

    def forward(self, batch: Flat, kv: KVPool) -> torch.Tensor:
        """Compute all tokens, write their K and V, and return hidden states, float32 [tokens, hidden]: of those that
        are needed; of others something else."""
        hidden = torch.empty((len(batch.tokens), self.config.hidden_size))
        self.library.forward(
            self._stepper,
            batch.tokens.ctypes.data,
            batch.rows.ctypes.data,
            len(batch.rows),
            None if batch.needed is None else batch.needed.ctypes.data,
            batch.pages.ctypes.data,
            kv.tensor.data_ptr(),
            hidden.data_ptr(),
        )
        return hidden

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] from `forward` -> float32 [n, vocab]."""
        return self.logits_and_peaks(x)[0]

    def logits_and_peaks(self, x: torch.Tensor) -> tuple[torch.Tensor, Peaks]:
        """The same, and the largest of each `library.UNDER` of a row."""
        x, n, vocab = x.contiguous(), x.shape[0], self.config.vocab_size
        out = torch.empty((n, vocab))
        peaks = Peaks(np.empty((n, -(-vocab // library.UNDER)), np.float32), np.empty(n, library.BEST))
        if n:
            self.library.logits(self._stepper, x.data_ptr(), n, out.data_ptr(), vocab, peaks)
        return out, peaks

    def decode_loop(self, kv: KVPool, bounds: library.Bounds, done: int) -> DecodeLoop | None:
        """For the thread that computes; None: it was not built. `done`: an eventfd, written when a step has ended."""
        sizes = (bounds, self.config.hidden_size)
        return DecodeLoop(self.library, self._stepper, kv.tensor, *sizes, done) if calls() else None

    def _layer(self, layer: LayerWeights) -> library.Layer:
        packed = self._arena.pack
        qkv, out = packed(layer.qkv, layer.qkv_bias), packed(layer.out, layer.out_bias)
        gate_up, down = packed(layer.gate_up, None), packed(layer.down, None)
        layer.qkv = layer.out = layer.gate_up = layer.down = torch.empty(0)
        norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
        return library.Layer(
            *(None if norm is None else self._hold(norm.float()) for norm in norms), qkv, out, gate_up, down
        )

    def _hold(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()


class _Arena:
    """All packed matrices, in one run of memory. `kind` is what they are kept as."""

    def __init__(self, to: Library, weights: Weights, kind: int) -> None:
        self._library, self.kind = to, kind
        sizes = [self._size(matrix) for matrix, _ in weights.products()]
        self._memory = mmap.mmap(-1, sum(sizes) + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next = -(-start // HUGE) * HUGE

    def pack(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> int:
        at = self._next
        self._next += self._size(matrix)
        scale: torch.Tensor | None = None
        if (made := MADE.get(self.kind)) is not None:
            values, scale = made(matrix)
        else:
            values = matrix.contiguous()
        added = None if bias is None else bias.float()
        self._library.pack(
            self.kind,
            values.data_ptr(),
            None if scale is None else scale.data_ptr(),
            None if added is None else added.data_ptr(),
            matrix.shape[0],
            matrix.shape[1],
            at,
        )
        return at

    def _size(self, matrix: torch.Tensor) -> int:
        return -(-self._library.packed_bytes(self.kind, *matrix.shape) // 64) * 64
