"""What a model folder may say, what is refused and in which words, and what the fingerprint tells apart."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quiesce.engine.config import read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.fingerprint import fingerprint
from quiesce.engine.rope import frequencies
from tiny_model import make_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def changed(tiny: Path, folder: Path, **changes: object) -> Path:
    copy = shutil.copytree(tiny, folder / "changed")
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | changes))
    return copy


def test_reads_the_tiny_model(tiny: Path) -> None:
    config = read_config(tiny)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.context_length == 512
    assert config.eos_ids == (1,)
    assert config.page_bytes("float32", 16) == 2 * 2 * 16 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "Phi3ForCausalLM"),
        ({"model_type": "qwen3"}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "four"}}, "no number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "makes no sense"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "no number"),
        ({"rope_scaling": {key: LLAMA3[key] for key in ("rope_type", "factor")}}, "original_max_position"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(tiny: Path, tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        read_config(changed(tiny, tmp_path, **changes))


def test_a_folder_without_config_and_one_with_broken_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        read_config(tmp_path)


def test_eos_comes_from_the_generation_config_before_the_model_config(tiny: Path, tmp_path: Path) -> None:
    copy = changed(tiny, tmp_path, eos_token_id=7)
    generation = copy / "generation_config.json"
    generation.write_text('{"eos_token_id": [5, 6, 5]}')
    assert read_config(copy).eos_ids == (5, 6)
    generation.write_text('{"eos_token_id": 3}')
    assert read_config(copy).eos_ids == (3,)
    generation.write_text('{"temperature": 0.6}')
    assert read_config(copy).eos_ids == (7,)
    generation.unlink()
    assert read_config(copy).eos_ids == (7,)


@pytest.mark.parametrize("eos", ["5", [5, None], 512, [-1], True])
def test_an_eos_that_is_no_token_is_refused(tiny: Path, tmp_path: Path, eos: object) -> None:
    copy = changed(tiny, tmp_path)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(EngineError, match="eos_token_id"):
        read_config(copy)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        {"rope_type": "yarn", "factor": 4.0},
        YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_frequencies_equal_those_of_transformers(
    tiny: Path, tmp_path: Path, scaling: dict[str, Any], head_dim: int
) -> None:
    config = read_config(changed(tiny, tmp_path, head_dim=head_dim, rope_scaling=scaling))
    theirs = LlamaConfig(
        head_dim=head_dim,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0} | scaling,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies(config.rope, head_dim), expected, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == pytest.approx(attention_factor)


def test_rotary_frequencies_without_scaling(tiny: Path) -> None:
    expected = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    torch.testing.assert_close(frequencies(read_config(tiny).rope, 64), expected, rtol=1e-6, atol=0)


def test_yarn_reaches_as_far_as_its_factor_stretches(tiny: Path, tmp_path: Path) -> None:
    assert read_config(changed(tiny, tmp_path, rope_scaling=YARN)).context_length == 1024


def test_the_fingerprint_tells_models_dtypes_and_page_sizes_apart(tiny: Path, tmp_path: Path) -> None:
    mine = fingerprint(read_config(tiny), "float32", 16)
    copy = shutil.copytree(tiny, tmp_path / "copy")
    assert mine.difference(fingerprint(read_config(copy), "float32", 16)) is None
    assert "dtype" in str(mine.difference(fingerprint(read_config(tiny), "bfloat16", 16)))
    assert "page_size" in str(mine.difference(fingerprint(read_config(tiny), "float32", 32)))
    other = changed(tiny, tmp_path, rms_norm_eps=1e-6)
    assert "weights" in str(mine.difference(fingerprint(read_config(other), "float32", 16)))


def test_the_fingerprint_tells_two_fine_tunes_apart(tmp_path: Path) -> None:
    tuned, again, other = (make_tiny_llama(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    first = fingerprint(read_config(tuned), "float32", 16)
    assert first.difference(fingerprint(read_config(again), "float32", 16)) is None
    assert "weights" in str(first.difference(fingerprint(read_config(other), "float32", 16)))


@pytest.mark.parametrize("at", [0.0, 0.3, 0.999])
def test_a_change_of_a_run_of_values_in_a_large_file_is_seen(tiny: Path, tmp_path: Path, at: float) -> None:
    """Sparse files of 64 MiB: blocks are sampled every MiB, so a change of a few MiB cannot hide."""
    copy = shutil.copytree(tiny, tmp_path / "copy")
    weights, size = copy / "model.safetensors", 64 << 20
    os.truncate(weights, size)
    before = fingerprint(read_config(copy), "float32", 16)
    with weights.open("r+b") as file:
        file.seek(int(at * size) + 200_000 if at < 0.9 else size - 100)
        file.write(b"x" * (2 << 20) if at < 0.9 else b"x")
    os.truncate(weights, size)
    assert "weights" in str(before.difference(fingerprint(read_config(copy), "float32", 16)))


def test_a_cut_safetensors_file_has_no_fingerprint(tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(EngineError, match="cut short"):
        fingerprint(read_config(copy), "float32", 16)
