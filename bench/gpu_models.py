"""Models for the GPU bench: the shape of one, with random weights that are made on the device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quiesce.engine.batch import Row
from quiesce.engine.config import ModelConfig, dtype_of, read_config
from quiesce.engine.gpu.graphs import CudaRecorder, Recorder
from quiesce.engine.gpu.paged import Attention
from quiesce.engine.kv import KVPool
from quiesce.engine.model import Model
from quiesce.engine.weights import LayerWeights, Weights

PAGE = 16
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}


def shaped(shape: dict[str, int], context: int) -> ModelConfig:
    """A Llama of this shape that is in no folder."""
    with tempfile.TemporaryDirectory() as folder:
        raw = {**shape, "model_type": "llama", "max_position_embeddings": context, "rope_theta": 500000.0}
        Path(folder, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return read_config(Path(folder))


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Small enough that activations stay finite through all layers."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), device=device, dtype=dtype).mul_(columns**-0.5)

    def norm() -> torch.Tensor:
        return torch.ones(config.hidden_size, device=device, dtype=dtype)

    q, kv, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden_size
    layers = [
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(q + 2 * kv, hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=matrix(hidden, q),
            out_bias=None,
            mlp_norm=norm(),
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
        )
        for _ in range(config.layers)
    ]
    embedding = matrix(config.vocab_size, hidden)
    return Weights(embedding, layers, norm(), matrix(config.vocab_size, hidden))


class Again:
    """Stands in for CUDA graphs where there is no CUDA: runs the recorded work once more into the same memory."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        out = work()

        def replay() -> None:
            out.copy_(work())

        return out, replay


@dataclass
class Bare:
    """A model and a pool without the engine's loop: what a step costs on the device."""

    config: ModelConfig
    model: Model
    kv: KVPool

    def rows(self, batch: int, tokens: int, start: int) -> list[Row]:
        """`batch` rows with pages of their own, as many as the pool has."""
        each = -(-(start + tokens) // PAGE)
        return [
            Row([1 + at % 100 for at in range(tokens)], start, range(row * each, (row + 1) * each))
            for row in range(batch)
        ]

    def step(self, rows: list[Row]) -> torch.Tensor:
        """The greedy token of each row's end, on the device."""
        batch = self.model.plan(rows, self.kv)
        hidden = self.model.forward(batch, self.kv)
        ends = torch.tensor([batch.firsts[n] + len(row.tokens) - 1 for n, row in enumerate(rows)])
        return self.model.logits(hidden[ends.to(hidden.device)]).argmax(-1)

    def weight_bytes(self) -> int:
        """Read by a decode step: every matrix, the embedding's rows aside."""
        return sum(matrix.numel() * matrix.element_size() for matrix, _ in self.model.weights.products())


def bare(config: ModelConfig, weights: Weights, attention: Attention, pages: int, context: int) -> Bare:
    dtype = next(name for name in ("bfloat16", "float32") if dtype_of(name) == weights.embedding.dtype)
    device = weights.embedding.device
    kv = KVPool(config, pages=pages, page_size=PAGE, dtype=dtype, device=device, apart=True)
    model = Model(config, weights, context_length=context, page_size=PAGE, deterministic=False, paged=attention)
    return Bare(config, model, kv)


def recorder(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else Again()
