"""Loads a Llama's safetensors into fused matrices on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quiesce.engine.config import ModelConfig, weight_files
from quiesce.engine.errors import EngineError

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # written by old exporters; computed here


@dataclass
class LayerWeights:
    """One layer. Matrices are [out, in]; `qkv` stacks q, k, v and `gate_up` stacks gate, up."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Weights:
    """The whole model. `head` is `embedding` itself where they are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]

    def matrices(self) -> Iterator[torch.Tensor]:
        """Every matrix that a step multiplies with."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head


def load_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Weights:
    """Read all shards. Raises EngineError naming tensors that are missing, unexpected or of another shape."""
    with ExitStack() as stack:
        reader = _Reader(config, stack, device, dtype)
        return reader.read()


class _Reader:
    def __init__(self, config: ModelConfig, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._files: dict[str, Any] = {}
        for path in weight_files(config.folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise EngineError(f"{path} cannot be read as safetensors: {error}") from None
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self) -> Weights:
        config = self._config
        shapes = self._expected()
        self._check(shapes)
        embedding = self._stack(["model.embed_tokens.weight"], shapes)
        layers = [self._layer(number, shapes) for number in range(config.layers)]
        head = embedding if config.tied else self._stack(["lm_head.weight"], shapes)
        return Weights(embedding, layers, self._stack(["model.norm.weight"], shapes), head)

    def _layer(self, number: int, shapes: dict[str, tuple[int, ...]]) -> LayerWeights:
        def stack(*names: str) -> torch.Tensor:
            return self._stack([f"model.layers.{number}.{name}.weight" for name in names], shapes)

        return LayerWeights(
            attention_norm=stack("input_layernorm"),
            qkv=stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=stack("self_attn.o_proj"),
            mlp_norm=stack("post_attention_layernorm"),
            gate_up=stack("mlp.gate_proj", "mlp.up_proj"),
            down=stack("mlp.down_proj"),
        )

    def _stack(self, names: list[str], shapes: dict[str, tuple[int, ...]]) -> torch.Tensor:
        rows = sum(shapes[name][0] for name in names)
        fused = torch.empty((rows, *shapes[names[0]][1:]), device=self._device, dtype=self._dtype)
        at = 0
        for name in names:
            fused[at : at + shapes[name][0]] = self._files[name].get_tensor(name)
            at += shapes[name][0]
        return fused

    def _expected(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{number}.{name}.weight": shape
            for number in range(config.layers)
            for name, shape in layer.items()
        }
        shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
        shapes["model.norm.weight"] = (hidden,)
        if not config.tied:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        return shapes

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        folder = self._config.folder
        missing = sorted(shapes.keys() - self._files.keys())
        if missing:
            raise EngineError(f"{folder}: {len(missing)} tensors are missing: {_few(missing)}")
        ignored = {"lm_head.weight"} if self._config.tied else set()
        extra = sorted(
            name for name in self._files.keys() - shapes.keys() - ignored if not name.endswith(IGNORED_SUFFIX)
        )
        if extra:
            raise EngineError(f"{folder}: {len(extra)} tensors are not of a plain Llama: {_few(extra)}")
        for name, shape in shapes.items():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise EngineError(f"{folder}: {name} has shape {found}, but config.json says {shape}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
