"""The GGUF converter writes the same model, as far as bf16 goes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.tiny_gguf import make_tiny_gguf
from quiesce.models.convert import convert, rope_halves, to_bf16
from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder


def converted(source: Path, folder: Path) -> Path:
    folder.mkdir()
    convert(source, folder)
    return check_folder(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_equals_the_original_rounded_by_torch(tmp_path: Path, tied: bool) -> None:
    result = load_file(converted(make_tiny_gguf(tmp_path, tied=tied), tmp_path / "out") / "model.safetensors")
    original = load_file(tmp_path / "hf" / "model.safetensors")
    assert result.keys() == original.keys()
    assert ("lm_head.weight" in result) is not tied
    for name, values in original.items():
        assert result[name].dtype == torch.bfloat16
        assert torch.equal(result[name], values.to(torch.bfloat16)), name


def test_the_folder_loads_in_transformers_and_computes_the_same_logits(tmp_path: Path) -> None:
    folder = converted(make_tiny_gguf(tmp_path), tmp_path / "out")
    ours, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).to(torch.float32)
    ids = torch.arange(5, 45).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, reference(ids).logits)
    assert ours.config.rms_norm_eps == 1e-05
    assert ours.config.rope_parameters["rope_theta"] == 10000.0
    assert ours.generation_config.eos_token_id == 1


def test_the_tokenizer_round_trips_splits_digits_and_knows_the_chat_template(tmp_path: Path) -> None:
    folder = converted(make_tiny_gguf(tmp_path), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the year 2024, čeština 漢字 🙂\n\ttab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == ["1", "2", "3", "4"]
    original = AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "hello there"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(
        messages, tokenize=False
    )
    assert tokenizer.encode("<|im_end|>") == [1]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2)


def test_to_bf16_rounds_as_torch_does_ties_and_limits_included() -> None:
    draw = np.random.Generator(np.random.Philox(key=7))
    bits = np.concatenate(
        [
            draw.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32),
            np.array([0, 0x80000000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 1], dtype=np.uint32),
        ]
    )
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bf16(values), expected)


def test_rope_halves_undoes_pairs_that_are_neighbours() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows: pairs (0,1) (2,3), (4,5) (6,7)
    assert rope_halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_tokenizer_kind_is_refused_by_name(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path, pre="llama-bpe")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="llama-bpe"):
        convert(source, tmp_path / "out")
    assert json.dumps(sorted(path.name for path in (tmp_path / "out").iterdir())) == "[]"
