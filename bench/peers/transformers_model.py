"""Plain transformers: the model's own forward with its default attention and its growing cache.

It is spared what it does not need: no padding, no attention mask, no generate() around it, and in prefill
only the last position's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.offline import Work


class Transformers:
    def __init__(self, model: str, dtype: str) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._model = LlamaForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._prompts: list[list[int]] = []
        self._cache: Any = None
        self._first = torch.empty(0)

    def begin(self, work: Work) -> None:
        if work.kind != "decode":
            self._prompts, self._cache = [], None
        elif work.prompts != self._prompts:
            self._prompts = work.prompts
            self._cache, self._first = self._prefill(work.prompts)
        elif grown := self._cache.get_seq_length() - len(work.prompts[0]):
            self._cache.crop(-grown)

    def window(self, work: Work) -> list[list[int]]:
        if work.kind == "decode":
            return self._decode(self._cache, self._first, work.steps).tolist()
        cache, first = self._prefill(work.prompts)
        if work.kind == "prefill":
            return list(first.tolist())
        return torch.cat([first, self._decode(cache, first, work.steps - 1)], 1).tolist()

    def _prefill(self, prompts: list[list[int]]) -> tuple[Any, torch.Tensor]:
        with torch.inference_mode():
            out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            return out.cache, out.logits[:, -1:].argmax(-1)

    def _decode(self, cache: Any, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        answers = []
        with torch.inference_mode():
            for _ in range(steps):
                tokens = self._model(tokens, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
                answers.append(tokens)
        return torch.cat(answers, 1)


def open_subject(model: str, dtype: str) -> Transformers:
    return Transformers(model, dtype)
