"""Makes a tiny random Llama as a Hugging Face folder: real files, real tokenizer, no torch needed.

The tokenizer is byte-level, so any text round-trips, and every id below `vocab` decodes to something.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD, START = "<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
SPECIALS = (BOS, EOS, PAD, START)
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_llama(
    folder: Path,
    *,
    vocab: int = 512,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    context: int = 512,
    seed: int = 0,
    tied: bool = False,
    intermediate: int = 128,
    rope_scaling: dict[str, object] | None = None,
) -> Path:
    """Write the model into `folder` (made if absent) and return it. Weights: fp32, drawn from `seed`.

    Ids 0..3 are BOS, EOS, PAD and <|im_start|>; 4..259 the bytes; the rest are two-letter merges.
    """
    if not 260 <= vocab <= 260 + len(LETTERS) ** 2:
        raise ValueError(f"vocab must be 260..{260 + len(LETTERS) ** 2}, not {vocab}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, vocab, context)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": context,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": vocab,
    }
    if rope_scaling is not None:
        config["rope_scaling"] = rope_scaling
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1], "pad_token_id": 2})
    sizes = {"layers": layers, "q": heads * head_dim, "kv": kv_heads * head_dim, "inner": intermediate}
    tensors = _weights(vocab, hidden, **sizes, seed=seed, tied=tied)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(
    vocab: int, hidden: int, *, layers: int, q: int, kv: int, inner: int, seed: int, tied: bool
) -> dict[str, np.ndarray]:
    draw = np.random.Generator(np.random.Philox(key=seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * (gain / columns**0.5)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * draw.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": norm(),
            at + "self_attn.q_proj.weight": matrix(q, hidden, 1.5),
            at + "self_attn.k_proj.weight": matrix(kv, hidden, 1.5),
            at + "self_attn.v_proj.weight": matrix(kv, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, q),
            at + "post_attention_layernorm.weight": norm(),
            at + "mlp.gate_proj.weight": matrix(inner, hidden),
            at + "mlp.up_proj.weight": matrix(inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 3.0)
    return tensors


def _write_tokenizer(folder: Path, vocab: int, context: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in LETTERS for b in LETTERS][: vocab - len(SPECIALS) - len(alphabet)]
    entries = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    ids = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "additional_special_tokens": [START],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
