"""What a model folder must hold before an engine or a tokenizer is pointed at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quiesce.models.errors import ModelError

MAX_HEADER = 100 * 1024 * 1024  # the bound that the safetensors format sets for its own header


def check_folder(folder: Path) -> Path:
    """Return `folder` when it is a complete Hugging Face folder: config.json, safetensors, tokenizer.json.

    Reads only the configuration and the headers of the weight files, so it costs milliseconds.
    Raises ModelError that says what is missing or damaged and what to do about it.
    """
    if not folder.is_dir():
        raise ModelError(
            f"There is no model folder at {folder}.", "Check the path, or name a hub id such as org/name."
        )
    config = read_json(folder / "config.json", "a Hugging Face model folder has one")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type.", "Is this a language model's folder?")
    for weights in weight_files(folder):
        check_safetensors(weights)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json.",
            "Write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
        )
    read_json(folder / "tokenizer.json", "it holds the tokenizer")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; every shard that an index names must be there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, "it lists the weight files").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map.", "Fetch the model again.")
        shards = sorted({str(name) for name in weight_map.values()})
        if outside := [name for name in shards if Path(name).name != name]:
            raise ModelError(f"{index} points outside its folder: {outside[0]!r}.", "Do not use this model.")
        if missing := [name for name in shards if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files, {missing[0]} first.",
                "Fetch the model again: its download did not finish.",
            )
        return [folder / name for name in shards]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} has pickled weights only.",
            "Quiesce reads safetensors alone: unpickling runs code. Convert the model with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    if any(folder.glob("*.gguf")):
        raise ModelError(
            f"{folder} holds GGUF weights.",
            "Use the model's safetensors folder; only smollm2 is converted from GGUF.",
        )
    raise ModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json.", "Is it complete?")


def check_safetensors(path: Path) -> None:
    """Compare a file's size with what its own header promises (finds truncation and LFS pointers)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ModelError(
                f"{path} is not a safetensors file ({size:,} bytes).",
                "It may be cut short, or a Git LFS pointer (then run `git lfs pull` in its folder).",
            )
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ModelError(f"{path} has a damaged header.", "Fetch the model again.") from error
    if size != expected:
        raise ModelError(f"{path} has {size:,} bytes, its header says {expected:,}.", "Fetch the model again.")


def read_json(path: Path, why: str) -> dict[str, Any]:
    """Return the JSON object in `path`; `why` ends the sentence for a reader who lacks the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; {why}.", "Is the model complete?") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "Fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.", "Fetch the model again.")
    return value
