"""Tiny random models of every family and variant, made and saved by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama3 scaling, tied": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=dict(LLAMA3)),
    ),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, head_dim=32)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None, head_dim=32)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2 yarn, tied": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=dict(YARN)),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32, rms_norm_eps=1e-5)),
    "qwen3 tied, biases": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    ),
}


def make(name: str, folder: Path, *, seed: int = 0, shard: str = "50GB") -> PreTrainedModel:
    """Save variant `name` into `folder`, and return the model: fp32, eval. Every parameter is drawn, so that none
    can be left out unseen: transformers starts biases at 0 and norms at 1."""
    kind, config = VARIANTS[name]
    draw = torch.Generator().manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if label.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif label.endswith("bias"):
                parameter.copy_(noise)
            elif "embed_tokens" in label:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
