"""How far a model's config.json says that it reaches. No torch here: what starts nothing yet asks too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def raw_config(folder: Path) -> dict[str, Any]:
    """What a model's config.json says; nothing where it is no object. Raises OSError and ValueError."""
    found = json.loads((folder / "config.json").read_bytes())
    return found if isinstance(found, dict) else {}


def own_context(folder: Path) -> int | None:
    """Tokens, of the model in this folder; None when it has no config.json that says so."""
    try:
        return context_of(raw_config(folder))
    except (OSError, ValueError):
        return None


def context_of(raw: Mapping[str, Any]) -> int | None:
    """Tokens; None when it does not say. yarn's factor counts: folders that had it added to them often still name the
    context from before."""
    named = raw.get("max_position_embeddings")
    if not isinstance(named, int) or named < 1:
        return None
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not isinstance(scaling, Mapping) or "yarn" not in (scaling.get("rope_type"), scaling.get("type")):
        return named
    try:
        stretched = int((scaling.get("original_max_position_embeddings") or named) * float(scaling["factor"]))
    except (KeyError, TypeError, ValueError, OverflowError):  # the engine says what is wrong with it
        return named
    return max(named, stretched)
