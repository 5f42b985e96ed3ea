"""Reads a Hugging Face folder: what the model is, where it stops, and the fingerprint peers must share."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quiesce.core.messages import Fingerprint
from quiesce.engine.errors import EngineError

LAYOUT = "page-major/row"  # [layers, 2 (k, v), page_size, kv_heads, head_dim] in one contiguous page
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
UNSUPPORTED = ("quantization_config", "sliding_window", "attention_bias", "mlp_bias")  # where set, not run
MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies. `kind` is default, linear or llama3; the last fields belong to llama3."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A Llama as its folder describes it. `context_length` is in tokens; `eos_ids` end an answer."""

    folder: Path
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
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise EngineError(f"{folder} has no config.json; give a Hugging Face model folder")
    architectures = raw.get("architectures") or []
    if raw.get("model_type") != "llama" or architectures not in ([], ["LlamaForCausalLM"]):
        raise EngineError(
            f"{folder} is a {raw.get('model_type')!r} ({', '.join(architectures) or 'no architecture named'});"
            " only LlamaForCausalLM is supported"
        )
    for name in UNSUPPORTED:
        if raw.get(name):
            raise EngineError(f"{folder}: {name} = {raw[name]!r} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{folder}: hidden_act = {raw['hidden_act']!r} is not supported; only silu is")
    hidden, heads = _positive(raw, folder, "hidden_size"), _positive(raw, folder, "num_attention_heads")
    raw.setdefault("num_key_value_heads", heads)
    raw["head_dim"] = raw.get("head_dim") or hidden // heads
    kv_heads, head_dim = _positive(raw, folder, "num_key_value_heads"), _positive(raw, folder, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise EngineError(f"{folder}: {heads} heads over {kv_heads} KV heads of {head_dim} do not divide evenly")
    return ModelConfig(
        folder=folder,
        vocab_size=_positive(raw, folder, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, folder, "intermediate_size"),
        layers=_positive(raw, folder, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=_positive(raw, folder, "max_position_embeddings"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(raw, folder),
        tied=bool(raw.get("tie_word_embeddings", False)),
        eos_ids=_read_eos(raw, folder),
    )


def fingerprint(config: ModelConfig, dtype: str, page_size: int) -> Fingerprint:
    """What a peer must share before a page of ours means anything to it.

    `weights` digests config.json and each safetensors file's name, size and header, not the values.
    """
    return Fingerprint(
        model=f"llama/{config.layers}x{config.hidden_size}/vocab{config.vocab_size}",
        weights=_weights_digest(config.folder),
        dtype=dtype,
        layout=LAYOUT,
        page_size=page_size,
        page_bytes=config.page_bytes(dtype, page_size),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted by name. Raises EngineError when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no .safetensors files; other weight formats are not read")
    return files


def _weights_digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
            if length > MAX_HEADER_BYTES:
                raise EngineError(f"{path} is not a safetensors file, or is cut short")
            header = file.read(length)
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + header)
    return digest.hexdigest()[:32]


def _read_rope(raw: dict[str, Any], folder: Path) -> Rope:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, kind, float(scaling["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                kind,
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise EngineError(f"{folder}: rope_scaling of type {kind!r} lacks {missing}") from None
    raise EngineError(f"{folder}: rope_scaling of type {kind!r} is not supported; default, linear and llama3 are")


def _read_eos(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    generation = _read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _read_json(path: Path) -> dict[str, Any] | None:
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
