"""Which kind of name is what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quiesce.models import registry
from quiesce.models.errors import ModelError
from tiny_model import make_tiny_llama


def test_a_local_folder_is_its_own_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path / "org" / "tiny").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "org/tiny", "./org/tiny", "~/org/tiny", "org/../org/tiny"):
        assert registry.resolve(name, progress=False) == folder


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-such"])
def test_a_path_that_is_not_there_is_never_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        registry.resolve(name, progress=False)


@pytest.mark.parametrize("name", ["smollm3", "", "a/b/c", "org/na me", "org/"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelError) as failure:
        registry.resolve(name, progress=False)
    assert "Known names: smollm2." in str(failure.value)


@pytest.mark.slow
def test_the_real_default_model_counts_to_a_hundred_in_transformers() -> None:
    folder = registry.resolve("smollm2")
    assert registry.pull("smollm2", verify=True) == registry.resolve("smollm2") == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "Count from 1 to 100, separated by commas."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert prompt.shape == (1, 44)
    # Greedy decoding says exactly this if, at each of its tokens, the one that follows is the likeliest.
    counted = tokenizer(", ".join(map(str, range(1, 101))), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        likeliest = model(torch.cat([prompt, counted], dim=1)).logits[0].argmax(-1)
    assert torch.equal(likeliest[prompt.shape[1] - 1 : -1], counted[0])
