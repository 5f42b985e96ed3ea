"""Rotary position embeddings: what config.json says of them, and the frequencies that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quiesce.engine.errors import EngineError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`kind` is one of KINDS. Frequency factors belong to llama3, betas and truncate to yarn; `attention_factor`
    scales cosines and sines."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(raw: dict[str, Any], folder: Path) -> Rope:
    """From a whole config.json, old or new style. Raises EngineError naming what is not supported or lacking."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise EngineError(f"{folder}: rope_parameters that differ from layer to layer are not supported")
    for source in (raw, scaling):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise EngineError(f"{folder}: partial_rotary_factor = {source['partial_rotary_factor']} is not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise EngineError(f"{folder}: rope_scaling of type {kind!r} is not supported; {', '.join(KINDS)} are")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    try:
        rope = _of_kind(kind, float(theta), scaling, raw["max_position_embeddings"])
    except KeyError as missing:
        raise EngineError(f"{folder}: rope_scaling of type {kind!r} lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise EngineError(f"{folder}: rope_scaling of type {kind!r} has a value that is no number: {error}") from None
    if not (rope.theta > 1 and rope.factor >= 1 and rope.original_context > 0):
        raise EngineError(f"{folder}: {rope} makes no sense: theta must be above 1, factor at least 1")
    return rope


def _of_kind(kind: str, theta: float, scaling: dict[str, Any], context: int) -> Rope:
    if kind == "default":
        return Rope(theta)
    factor = float(scaling["factor"])
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor,
            int(scaling["original_max_position_embeddings"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    truncate = scaling.get("truncate")
    return Rope(
        theta,
        kind,
        factor,
        int(scaling.get("original_max_position_embeddings") or context),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=True if truncate is None else bool(truncate),
        attention_factor=_yarn_attention_factor(factor, scaling),
    )


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(float(above)) / scale(float(below)) if above and below else scale(1.0)


def rotary(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position's rotation, each float32 [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions).float(), frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Float32 [head_dim / 2], as transformers computes them."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched by the factor, those between are blended."""
    wavelength = 2 * math.pi / base
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * base / rope.factor + blend * base
    scaled = torch.where(wavelength > low, base / rope.factor, base)
    return torch.where((wavelength <= low) & (wavelength >= high), between, scaled)


def _yarn(rope: Rope, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """As llama3, but the blend is a ramp over dimensions, between those that turn beta_fast and beta_slow times."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * stretched + base * (1 - stretched)
