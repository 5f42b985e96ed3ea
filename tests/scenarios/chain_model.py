"""A tiny random model that writes a known text: each byte of it makes the next one by far the likeliest token.

The text is full of characters of several bytes, so every way to cut an answer cuts one of them somewhere. The rest
of the weights stays random: log-probabilities still depend on the whole prompt, and so on every page of KV.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tiny_model import EOS, make_tiny_llama

# Hangul, an emoji, a combining accent, Han, a symbol: no byte occurs twice, so each has one successor.
TEXT = "한🚀e\u0301日☃"
ENDS = "Z"  # the byte after which the model ends its answer
PULL = 0.5  # enough for greedy decoding; at a high temperature other tokens have their chance


def make_chain_model(folder: Path) -> Path:
    make_tiny_llama(folder, layers=2, context=512)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = tokenizer.encode(TEXT).ids
    assert len(set(path)) == len(path) == len(TEXT.encode())
    steps = dict(zip(path, path[1:] + path[:1], strict=True))
    steps[tokenizer.encode("\n").ids[0]] = path[0]  # what the chat template ends with
    steps[tokenizer.encode(ENDS).ids[0]] = tokenizer.token_to_id(EOS)
    weights = load_file(folder / "model.safetensors")
    for token, successor in steps.items():
        weights["lm_head.weight"][successor] += PULL * weights["model.embed_tokens.weight"][token]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def text_ids(folder: Path) -> list[int]:
    """The token ids of TEXT, one a byte."""
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids)
