"""What a request that leaves a sampling field out gets: the model folder's generation_config.json, else OpenAI's."""

from __future__ import annotations

from typing import Any

from quiesce.api.schemas import out_of_range

OPENAI: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
DRAWING = ("temperature", "top_p", "top_k", "min_p")  # not meant in a file that says `do_sample: false`


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Values for the fields of `OPENAI`.

    Raises ValueError for a value that no request may have either: to serve with another one would be a guess.
    """
    return {name: _one(generation_config, name, default) for name, default in OPENAI.items()}


def _one(generation_config: dict[str, Any], name: str, default: Any) -> Any:
    value = generation_config.get(name)
    if value is None or (name in DRAWING and generation_config.get("do_sample") is False):
        return default
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        raise ValueError(f"generation_config.json: {name} must be a number, not {value!r}")
    if (why := out_of_range(name, value)) is not None:
        raise ValueError(f"generation_config.json: {name} {why}")
    return max(value, 0) if name == "top_k" else float(value)
