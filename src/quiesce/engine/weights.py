"""Loads a model's safetensors into fused matrices on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quiesce.engine.config import ModelConfig, read_json
from quiesce.engine.errors import EngineError

INDEX = "model.safetensors.index.json"
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # written by old exporters; computed here


@dataclass
class LayerWeights:
    """One layer. Matrices are [out, in]; `qkv` stacks q, k, v and `gate_up` stacks gate, up. None: has none."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
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

    def products(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every matrix that a step multiplies with, and its bias."""
        for layer in self.layers:
            yield layer.qkv, layer.qkv_bias
            yield layer.out, layer.out_bias
            yield layer.gate_up, None
            yield layer.down, None
        yield self.head, None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of an index, else all in the folder, sorted by name. Raises EngineError if any lacks."""
    index = read_json(folder / INDEX)
    if index is None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{folder} has no .safetensors files; other weight formats are not read")
        return files
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise EngineError(f"{folder / INDEX} has no weight_map from tensors to files")
    files = sorted(folder / name for name in set(names.values()))
    for file in files:
        if file.parent != folder or not file.is_file():
            raise EngineError(
                f"{folder / INDEX} names {file.name}, which is not in the folder; fetch the model again"
            )
    return files


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
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in self._files:
                    raise EngineError(f"{path} has {name}, and so has another file of {config.folder}")
                self._files[name] = file

    def read(self) -> Weights:
        config = self._config
        shapes = self._expected()
        self._check(shapes)
        embedding = self._stack(["model.embed_tokens.weight"], shapes)
        layers = [self._layer(number, shapes) for number in range(config.layers)]
        head = embedding if config.tied else self._stack(["lm_head.weight"], shapes)
        return Weights(embedding, layers, self._stack(["model.norm.weight"], shapes), head)

    def _layer(self, number: int, shapes: dict[str, tuple[int, ...]]) -> LayerWeights:
        config, at = self._config, f"model.layers.{number}."

        def stack(*names: str) -> torch.Tensor:
            return self._stack([at + name for name in names], shapes)

        qkv = [f"self_attn.{which}_proj" for which in "qkv"]
        return LayerWeights(
            attention_norm=stack("input_layernorm.weight"),
            qkv=stack(*(name + ".weight" for name in qkv)),
            qkv_bias=stack(*(name + ".bias" for name in qkv)) if config.qkv_bias else None,
            q_norm=stack("self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=stack("self_attn.k_norm.weight") if config.qk_norm else None,
            out=stack("self_attn.o_proj.weight"),
            out_bias=stack("self_attn.o_proj.bias") if config.out_bias else None,
            mlp_norm=stack("post_attention_layernorm.weight"),
            gate_up=stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=stack("mlp.down_proj.weight"),
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
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if config.out_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config.head_dim,))
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{number}.{name}": shape for number in range(config.layers) for name, shape in layer.items()
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
            kind = self._config.model_type
            raise EngineError(f"{folder}: {len(extra)} tensors do not belong to a {kind} like this: {_few(extra)}")
        for name, shape in shapes.items():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise EngineError(f"{folder}: {name} has shape {found}, but config.json says {shape}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
