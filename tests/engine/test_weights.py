"""Loading: shards, tied heads, and errors that name the tensor."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from quiesce.engine.config import read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.weights import Weights, load_weights
from tiny_model import make_tiny_llama

CPU = torch.device("cpu")


def rewritten(tiny: Path, folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    copy = shutil.copytree(tiny, folder / "copy")
    save_file(tensors, copy / "model.safetensors")
    return copy


def load(folder: Path) -> Weights:
    return load_weights(read_config(folder), CPU, torch.float32)


def test_shards_load_as_one_file_does(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    names = sorted(tensors)
    copy = rewritten(tiny, tmp_path, {name: tensors[name] for name in names[::2]})
    save_file({name: tensors[name] for name in names[1::2]}, copy / "more.safetensors")
    whole, sharded = load(tiny), load(copy)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole.products(), sharded.products(), strict=True))
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert np.array_equal(whole.layers[1].qkv[: q.shape[0]].numpy(), q)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = load(make_tiny_llama(tmp_path, tied=True))
    assert weights.head is weights.embedding


def test_missing_extra_and_misshapen_tensors_are_named(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    cases = {
        "missing": {key: value for key, value in tensors.items() if key != name},
        "shape": tensors | {name: tensors[name][:-1]},
        "do not belong to a llama": tensors | {"model.layers.0.mlp.up_proj.bias": np.zeros(3, np.float32)},
    }
    for words, content in cases.items():
        with pytest.raises(EngineError, match=words) as error:
            load(rewritten(tiny, tmp_path / words.split()[0], content))
        assert "model.layers.0.mlp.up_proj" in str(error.value)


def test_a_folder_without_safetensors_is_refused(tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no \.safetensors"):
        load(copy)
