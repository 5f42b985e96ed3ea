"""What a model folder may say, what is refused and in which words, and what the fingerprint tells apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quiesce.engine.config import fingerprint, read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.model import frequencies
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
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
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
    (copy / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_config(copy).eos_ids == (5, 6)
    (copy / "generation_config.json").unlink()
    assert read_config(copy).eos_ids == (7,)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotary_frequencies_equal_those_of_transformers(tmp_path: Path, scaling: dict[str, object] | None) -> None:
    config = read_config(make_tiny_llama(tmp_path, head_dim=64, rope_scaling=scaling))
    parameters = {"rope_theta": 10000.0, "rope_type": "default"} | (scaling or {})
    theirs = LlamaConfig(
        head_dim=64, hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=parameters
    )
    if scaling is None:
        expected = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](theirs, torch.device("cpu"))
    torch.testing.assert_close(frequencies(config.rope, 64), expected, rtol=1e-6, atol=0)


def test_the_fingerprint_tells_models_dtypes_and_page_sizes_apart(tiny: Path, tmp_path: Path) -> None:
    mine = fingerprint(read_config(tiny), "float32", 16)
    copy = shutil.copytree(tiny, tmp_path / "copy")
    assert mine.difference(fingerprint(read_config(copy), "float32", 16)) is None
    assert "dtype" in str(mine.difference(fingerprint(read_config(tiny), "bfloat16", 16)))
    assert "page_size" in str(mine.difference(fingerprint(read_config(tiny), "float32", 32)))
    other = changed(tiny, tmp_path, rms_norm_eps=1e-6)
    assert "weights" in str(mine.difference(fingerprint(read_config(other), "float32", 16)))


def test_a_cut_safetensors_file_has_no_fingerprint(tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(EngineError, match="cut short"):
        fingerprint(read_config(copy), "float32", 16)
