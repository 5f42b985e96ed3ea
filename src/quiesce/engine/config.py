"""Reads a Hugging Face folder: what the model is and where it stops."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quiesce.engine.context import context_of
from quiesce.engine.errors import EngineError
from quiesce.engine.rope import Rope, read_rope

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
UNSUPPORTED = ("quantization_config", "mlp_bias")  # where set, not run


@dataclass(frozen=True)
class Family:
    """How a model type differs from the first Llama. `biasable`: config.json may ask for attention biases.

    `window` is what config.json means when it does not name sliding_window, `window_switch` that it counts
    only with use_sliding_window; `head_dim` likewise, None: hidden_size / heads.
    """

    architecture: str
    biasable: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None
    window_switch: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", biasable=True),
    "mistral": Family("MistralForCausalLM", window=4096),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window=4096, window_switch=True),
    "qwen3": Family("Qwen3ForCausalLM", biasable=True, qk_norm=True, head_dim=128, window=4096, window_switch=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder as its folder describes it. `context_length` is in tokens; `eos_ids` end an answer.

    `qkv_bias` and `out_bias`: the attention's projections have biases; `qk_norm`: each head's q and k are
    normalised before they are rotated.
    """

    folder: Path
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    def page_bytes(self, dtype: str, page_size: int) -> int:
        """Bytes of one KV page of `page_size` tokens over all layers."""
        return self.layers * 2 * page_size * self.kv_heads * self.head_dim * dtype_of(dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise EngineError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises EngineError naming the first thing this engine does not support."""
    raw = read_json(folder / "config.json")
    if raw is None:
        raise EngineError(f"{folder} has no config.json; give a Hugging Face model folder")
    family = _family(raw, folder)
    for name in UNSUPPORTED:
        if raw.get(name):
            raise EngineError(f"{folder}: {name} = {raw[name]!r} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{folder}: hidden_act = {raw['hidden_act']!r} is not supported; only silu is")
    _check_whole_attention(raw, family, folder)
    hidden, heads = _positive(raw, folder, "hidden_size"), _positive(raw, folder, "num_attention_heads")
    raw.setdefault("num_key_value_heads", heads)
    raw["head_dim"] = raw.get("head_dim") or family.head_dim or hidden // heads
    kv_heads, head_dim = _positive(raw, folder, "num_key_value_heads"), _positive(raw, folder, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise EngineError(f"{folder}: {heads} heads over {kv_heads} KV heads of {head_dim} do not divide evenly")
    context = _positive(raw, folder, "max_position_embeddings")
    rope = read_rope(raw, folder)
    bias = family.biasable and bool(raw.get("attention_bias"))
    return ModelConfig(
        folder=folder,
        model_type=raw["model_type"],
        vocab_size=_positive(raw, folder, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, folder, "intermediate_size"),
        layers=_positive(raw, folder, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context_of(raw) or context,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or bias,
        out_bias=bias,
        qk_norm=family.qk_norm,
        eos_ids=_read_eos(raw, folder),
    )


def _family(raw: dict[str, Any], folder: Path) -> Family:
    kind, architectures = raw.get("model_type"), raw.get("architectures") or []
    family = FAMILIES.get(str(kind))
    if family is None or architectures not in ([], [family.architecture]):
        supported = ", ".join(known.architecture for known in FAMILIES.values())
        named = ", ".join(map(str, architectures)) or "no architecture named"
        raise EngineError(f"{folder} is a {kind!r} ({named}); supported are {supported}")
    return family


def _check_whole_attention(raw: dict[str, Any], family: Family, folder: Path) -> None:
    window = raw.get("sliding_window", family.window)
    if window and (raw.get("use_sliding_window") or not family.window_switch):
        raise EngineError(
            f"{folder}: sliding_window = {window} is not supported; use a model that attends to its whole context"
        )
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise EngineError(f"{folder}: layer_types with {kind!r} are not supported; only full_attention is")


def _read_eos(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """One id or a list, of generation_config.json if it names any, else of config.json."""
    eos = (read_json(folder / "generation_config.json") or {}).get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(number) is int and 0 <= number < raw["vocab_size"] for number in ids):
        raise EngineError(f"{folder}: eos_token_id = {eos!r}; token ids below {raw['vocab_size']} are needed")
    return tuple(dict.fromkeys(ids))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file. Raises EngineError for anything else."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineError(f"{path} is not a JSON object")
    return content


def _positive(raw: dict[str, Any], folder: Path, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value <= 0:
        raise EngineError(f"{folder}/config.json: {name} = {value!r}; a positive whole number is needed")
    return value
