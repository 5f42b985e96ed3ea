"""The test model itself: a tokenizer that round-trips, a folder that transformers accepts."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tiny_model import make_tiny_llama


@pytest.mark.parametrize(
    "text",
    [
        "plain words, twice twice",
        "  spaces\n\ttabs ",
        "čeština 漢字 🙂‍↔️ \x00\x7f",
        "",
        "the <|im_end|> of it",
    ],
)
def test_any_text_round_trips(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny_llama(tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert all(0 <= token < 512 for token in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_decodes_and_specials_have_their_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tiny_llama(tmp_path, vocab=600) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 600
    assert all(tokenizer.id_to_token(number) for number in range(600))
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.token_to_id("<|im_end|>") == 1


def test_transformers_renders_the_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path))
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == 1


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first = make_tiny_llama(tmp_path / "a", seed=3) / "model.safetensors"
    second = make_tiny_llama(tmp_path / "b", seed=3) / "model.safetensors"
    other = make_tiny_llama(tmp_path / "c", seed=4) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
