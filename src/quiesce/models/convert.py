"""Turns a Llama GGUF file into a plain Hugging Face folder (bf16 safetensors), with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quiesce.models.errors import ModelError

FIXED_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token
NORMAL_TOKEN = 1


def convert(
    source: Path,
    folder: Path,
    advance: Callable[[int], None] = lambda _: None,
    sampling: dict[str, Any] | None = None,
) -> None:
    """Write `source` (GGUF, llama, byte-level BPE) as a Hugging Face folder into the empty `folder`.

    Weights are dequantised to fp32 and rounded once to bf16 (to nearest, ties to even). `advance` hears of
    the GGUF bytes done. `sampling` goes into generation_config.json, because a GGUF file does not hold what
    its authors recommend. Raises ModelError when the file is of a kind that this converter does not know.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields.get("general.architecture"), fields.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ModelError(
            f"{source.name} has architecture {kind[0]} and tokenizer {kind[1]}.",
            "Only llama with the smollm tokenizer is converted; use the model's safetensors folder.",
        )
    config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    # The specs below are bare pointers into these arrays, which must live until the file is written.
    tensors = dict(converted_tensors(reader, config, advance))
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes
        )
        for name, bits in tensors.items()
    }
    safetensors.serialize_file(specs, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in TOKEN_IDS if key in config}
    write_json(folder / "generation_config.json", token_ids | (sampling or {}))
    write_tokenizer(fields, folder)


TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Return config.json of a Llama model from GGUF's fields."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **{key: fields[name] for key, name in TOKEN_IDS.items() if name in fields},
    }


def shortest(value: float) -> float:
    """Return the shortest decimal of the same fp32 number (GGUF's 9.9999997e-06 was written as 1e-05)."""
    return float(str(np.float32(value)))


def converted_tensors(
    reader: gguf.GGUFReader, config: dict[str, Any], advance: Callable[[int], None]
) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Yield (Hugging Face name, bf16 bits in Hugging Face's shape, C order) of each tensor."""
    rows = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in rows:
            values = rope_halves(values, rows[part])
        if not np.isfinite(values).all():
            raise ModelError(f"Tensor {tensor.name} holds values that are not finite.", "Do not use this model.")
        yield hugging_face_name(tensor.name), to_bf16(values)
        advance(int(tensor.n_bytes))


def hugging_face_name(name: str) -> str:
    """Map GGUF's tensor name to that of LlamaForCausalLM; ModelError when it is unknown."""
    if name in FIXED_NAMES:
        return FIXED_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ModelError(
        f"The GGUF file has a tensor {name!r} that a plain Llama has not.", "Use its safetensors folder."
    )


def rope_halves(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's row order of q and k: rotated pairs are neighbours there, halves of a head here."""
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite fp32 to bf16 bit patterns, to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja from GGUF's tokenizer fields."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    if unknown := set(kinds) - {NORMAL_TOKEN, CONTROL_TOKEN}:
        raise ModelError(f"The GGUF file has tokens of kinds {sorted(unknown)}.", "Use its safetensors folder.")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # The smollm kind: each digit is a token of its own, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError("The GGUF file's vocabulary has doubled tokens.", "Use the model's safetensors folder.")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "additional_special_tokens": special,
            "chat_template": template,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one readable JSON file."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
