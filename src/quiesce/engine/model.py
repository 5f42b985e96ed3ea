"""The forward pass of a Llama, Mistral, Qwen2 or Qwen3 in plain PyTorch: any device, and the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quiesce.engine import attention
from quiesce.engine.attention import EXACT_BLOCK
from quiesce.engine.batch import MIN_ROWS, Batch, Row, plan
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu.graphs import SIZES, DecodeGraphs, Recorder
from quiesce.engine.gpu.paged import Attention
from quiesce.engine.kv import KVPool
from quiesce.engine.product import pack, packable, packed, product
from quiesce.engine.rope import rotary
from quiesce.engine.weights import LayerWeights, Weights

PROBE_ROWS = (MIN_ROWS, 7, 33, 64, 130)


class Model:
    """Weights plus rotary tables. `deterministic` makes a token's bits independent of its batch. `paged`: attention
    over pages where they lie, instead of over gathered copies; not deterministic."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        context_length: int,
        page_size: int,
        deterministic: bool,
        paged: Attention | None = None,
    ) -> None:
        assert paged is None or not deterministic
        self.paged, self.graphs = paged, None  # type: Attention | None, DecodeGraphs | None
        self.config, self.weights, self.deterministic = config, weights, deterministic
        self._dtype, self._device = weights.embedding.dtype, weights.embedding.device
        self._q_size, self._kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._block = block_of(page_size, deterministic)
        cos, sin = rotary(config.rope, config.head_dim, context_length)
        # laid out for whole heads, the sign of the rotation folded in
        self._cos = torch.cat((cos, cos), 1).to(self._device, self._dtype)
        self._sin = torch.cat((-sin, sin), 1).to(self._device, self._dtype)
        if deterministic:
            _pack_for_exact_rows(weights)
        else:
            pack(weights)

    def plan(self, rows: Sequence[Row], kv: KVPool) -> Batch:
        """Lay out checked rows for `forward`."""
        return plan(
            rows,
            kv,
            deterministic=self.deterministic,
            block=self._block,
            device=self._device,
            paged=self.paged is not None,
        )

    def record(self, kv: KVPool, by: Attention, recorder: Recorder, sizes: tuple[int, ...] = SIZES) -> None:
        """Graphs of the decode step, with attention `by`. Raises whatever recording raises."""
        self.graphs = DecodeGraphs(
            lambda batch: self._layers(batch, kv, by),
            kv,
            context_length=self._cos.shape[0],
            recorder=recorder,
            sizes=sizes,
        )

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Compute all tokens, write their K and V, and return hidden states [tokens, hidden] for `logits`."""
        kv.clear(batch.cleared)
        if self.graphs is not None and (hidden := self.graphs.run(batch)) is not None:
            return hidden
        for segment in batch.segments:
            assert self.paged is not None
            self.paged.plan(segment)
        return self._layers(batch, kv, self.paged)

    def _layers(self, batch: Batch, kv: KVPool, paged: Attention | None) -> torch.Tensor:
        weights, eps = self.weights, self.config.norm_eps
        shape = (self.config.hidden_size,)
        x = F.embedding(batch.tokens, weights.embedding)
        cos, sin = self._cos[batch.positions].unsqueeze(1), self._sin[batch.positions].unsqueeze(1)
        for number, layer in enumerate(weights.layers):
            qkv = product(F.rms_norm(x, shape, layer.attention_norm, eps), layer.qkv, layer.qkv_bias)
            self._normalise(qkv, layer)
            self._rotate(qkv, cos, sin)
            attended = self._attend(number, qkv, batch, kv, paged)
            x += product(attended, layer.out, layer.out_bias)
            gate, up = product(F.rms_norm(x, shape, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
            x += product(F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] from `forward` -> [n, vocab]."""
        wanted = x.shape[0]
        if not wanted:
            return x.new_empty((0, self.config.vocab_size))
        if self.deterministic and wanted < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - wanted))
        x = F.rms_norm(x, (self.config.hidden_size,), self.weights.norm, self.config.norm_eps)
        return product(x, self.weights.head)[:wanted]

    def _normalise(self, qkv: torch.Tensor, layer: LayerWeights) -> None:
        """Normalise each head of q and k in place, in models that do."""
        if layer.q_norm is None or layer.k_norm is None:
            return
        dim, k_end = self.config.head_dim, self._q_size + self._kv_size
        for part, norm in ((qkv[:, : self._q_size], layer.q_norm), (qkv[:, self._q_size : k_end], layer.k_norm)):
            heads = part.view(part.shape[0], -1, dim)
            heads.copy_(F.rms_norm(heads, (dim,), norm, self.config.norm_eps))

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the q and k parts in place."""
        dim = self.config.head_dim
        heads = qkv[:, : self._q_size + self._kv_size].view(qkv.shape[0], -1, dim)
        turned = heads.roll(dim // 2, -1).mul_(sin)
        heads.mul_(cos).add_(turned)

    def _attend(
        self, layer: int, qkv: torch.Tensor, batch: Batch, kv: KVPool, paged: Attention | None
    ) -> torch.Tensor:
        """Write K and V of the batch's tokens, then attend: [tokens, heads * head_dim]."""
        config, n = self.config, batch.n
        q = qkv[:, : self._q_size].view(-1, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
        new = qkv[:n, self._q_size :].view(n, 2, config.kv_heads, config.head_dim)
        kv.write(layer, batch.slots, new)
        if paged is not None:
            k, v = kv.of_layer(layer)
            parts = [paged.attend(q[part.first : part.last], k, v, part) for part in batch.segments]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, self._q_size)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in batch.groups:
            rows = slice(group.first, group.last)
            k, v = kv.gather(layer, group.halves, group.last - group.first)
            if self.deterministic:
                out[rows] = attention.exact_decode(q[rows], k, v, group.hidden)
            else:
                out[rows] = attention.decode(q[rows], k, v, group.bias)
        for chunk in batch.chunks:
            rows = slice(chunk.first, chunk.last)
            if self.deterministic:
                k, v = kv.gather(layer, chunk.halves, 1)
                out[rows] = attention.exact_prefill(q[rows], k[0], v[0], chunk.start)
            elif chunk.start:
                k, v = kv.gather(layer, chunk.halves, 1)
                end = chunk.start + chunk.last - chunk.first
                out[rows] = attention.prefill(q[rows], k[0, :end], v[0, :end], chunk.start)
            else:
                out[rows] = attention.prefill(q[rows], new[rows, 0], new[rows, 1], 0)
        out[n:] = 0  # padding rows must be finite
        return out.view(-1, self._q_size)


def block_of(page_size: int, deterministic: bool) -> int:
    """The number of tokens to which what a row reads is padded. Raises EngineError."""
    if not deterministic:
        return page_size
    if EXACT_BLOCK % page_size and page_size % EXACT_BLOCK:
        raise EngineError(f"deterministic: page size {page_size} and {EXACT_BLOCK} must divide evenly")
    return max(page_size, EXACT_BLOCK)


def _pack_for_exact_rows(weights: Weights) -> None:
    """Packed matrices where they round a row the same however many rows there are, else the plain ones if those do.

    Raises EngineError when neither does on this machine."""
    kinds = {(matrix.shape, bias is None): (matrix, bias) for matrix, bias in weights.products()}
    if packable(weights.embedding) and all(rows_that_differ(packed(m), m, b) is None for m, b in kinds.values()):
        pack(weights)
        return
    for matrix, bias in kinds.values():
        rows = rows_that_differ(matrix, matrix, bias)
        if rows is not None:
            raise EngineError(
                f"deterministic: on this machine a {tuple(matrix.shape)} {matrix.dtype} product of {rows} rows"
                " rounds differently from a larger one; run without it, or with another dtype or threads"
            )


def rows_that_differ(matrix: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None) -> int | None:
    """How many rows, at least MIN_ROWS, make products with `matrix` round a row differently; None: none found."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((max(PROBE_ROWS), plain.shape[1]), generator=draw).to(plain)
    whole = product(x, matrix, bias)
    for rows in PROBE_ROWS:
        if not torch.equal(product(x[-rows:].contiguous(), matrix, bias), whole[-rows:]):
            return rows
    return None
