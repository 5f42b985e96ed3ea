"""Writes a tiny Llama as llama.cpp's converter would: GGUF, fp32, rotated rows of q and k as neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from quiesce.models.convert import FIXED_NAMES, LAYER_NAMES
from tiny_model import CHAT_TEMPLATE, SPECIALS, make_tiny_llama


def make_tiny_gguf(folder: Path, *, tied: bool = True, seed: int = 0, pre: str = "smollm") -> Path:
    """Make `folder`/hf (the model as Hugging Face writes it) and return `folder`/model.gguf, the same in GGUF."""
    source = make_tiny_llama(folder / "hf", tied=tied, seed=seed)
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, source, pre)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in load_file(source / "model.safetensors").items():
        part = name.split(".")[-2]
        writer.add_tensor(gguf_name(name), neighbours(values, heads[part]) if part in heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, pre: str) -> None:
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_name(name: str) -> str:
    """Map Hugging Face's tensor name back to GGUF's."""
    for short, long in FIXED_NAMES.items():
        if name == long:
            return short
    _, _, layer, rest = name.split(".", 3)
    part = next(short for short, long in LAYER_NAMES.items() if rest == f"{long}.weight")
    return f"blk.{layer}.{part}.weight"


def neighbours(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation (convert_hf_to_gguf.py, LlamaModel.permute)."""
    pairs = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))
