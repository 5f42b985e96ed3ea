"""A model folder is refused for the thing that is wrong with it, before an engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder
from tiny_model import make_tiny_llama


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def rename_weights(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name) and None


def index(*shards: str) -> Callable[[Path], None]:
    content = json.dumps({"weight_map": {f"tensor{number}": name for number, name in enumerate(shards)}})
    return write("model.safetensors.index.json", content.encode())


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "no config.json"),
    "config is not JSON": (write("config.json", b"{"), "config.json cannot be read"),
    "config is a list": (write("config.json", b"[]"), "not a JSON object"),
    "config without model_type": (write("config.json", b"{}"), "no model_type"),
    "no tokenizer": (remove("tokenizer.json"), "no tokenizer.json"),
    "no weights": (remove("model.safetensors"), "no model.safetensors"),
    "pickled weights": (rename_weights("pytorch_model.bin"), "pickled weights only"),
    "gguf weights": (rename_weights("model.gguf"), "GGUF"),
    "cut weights": (cut_weights, "its header says"),
    "git lfs pointer": (write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "LFS"),
    "empty weights": (write("model.safetensors", b""), "not a safetensors file"),
    "header is not JSON": (write("model.safetensors", b"\x02" + bytes(7) + b"{{"), "damaged header"),
    "missing shard": (index("model.safetensors", "model-2.safetensors"), "lacks 1 of 2 weight files, model-2"),
    "shard outside": (index("../other.safetensors"), "outside its folder"),
    "empty index": (write("model.safetensors.index.json", b"{}"), "no weight_map"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    folder = make_tiny_llama(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelError, match=message):
        check_folder(folder)


def test_a_complete_folder_passes_whole_or_in_shards(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    assert check_folder(folder) == folder
    rename_weights("model-1.safetensors")(folder)
    index("model-1.safetensors")(folder)
    assert check_folder(folder) == folder


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder at .*absent"):
        check_folder(tmp_path / "absent")
