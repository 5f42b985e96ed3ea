"""The engines side by side: each prepares a case once, then repeats its window on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from bench.cases import PREFILL, PROMPT, Case, decode_prompts, prefill_prompt


class Subject(Protocol):
    """Both methods return what was generated, so that the caller can see that all engines did the same work."""

    def prepare(self, case: Case) -> None:
        """Everything that is not timed: prompts, and their keys and values for a decode case."""

    def window(self, case: Case) -> list[list[int]]:
        """The timed part. Returns a list of tokens for each request."""


class Quiesce:
    """The engine as a worker drives it: rows and page tables in, tokens out."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from quiesce.core.messages import Sampling  # noqa: PLC0415
        from quiesce.engine.batch import Row  # noqa: PLC0415
        from quiesce.engine.engine import Engine  # noqa: PLC0415

        self._row, self._greedy, self._folder = Row, Sampling(max_tokens=1), folder
        self._pages = -(-PREFILL // 16) * 8
        self._engine = Engine(folder, dtype=dtype, page_size=16, pool_pages=self._pages, threads=1)
        self._tables: list[list[int]] = []
        self._first: list[int] = []
        self._prompt = prefill_prompt(folder)

    def prepare(self, case: Case) -> None:
        if not case.steps:
            self._tables = [list(range(PREFILL // 16))]
            return
        each = self._pages // case.batch
        self._tables = [list(range(row * each, row * each + each)) for row in range(case.batch)]
        self._first = []
        for prompt, table in zip(decode_prompts(self._folder, case.batch), self._tables, strict=True):
            self._first += self._step([self._row(prompt, 0, table, self._greedy)])

    def window(self, case: Case) -> list[list[int]]:
        step, row, greedy = self._step, self._row, self._greedy
        if not case.steps:
            return [step([row(self._prompt, 0, self._tables[0], greedy)])]
        tokens, answers = self._first, []
        for at in range(PROMPT, PROMPT + case.steps):
            rows = [row([token], at, table, greedy) for token, table in zip(tokens, self._tables, strict=True)]
            tokens = step(rows)
            answers.append(tokens)
        return [list(answer) for answer in zip(*answers, strict=True)]

    def _step(self, rows: list[Any]) -> list[int]:
        return [token for token in self._engine.step(rows) if token is not None]


class Transformers:
    """Plain transformers: the model's own forward with its default attention and its growing cache.

    It is spared what it does not need: no padding, no attention mask, no generate() around it, and in prefill
    only the last position's logits.
    """

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import LlamaForCausalLM  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._folder = folder
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._cache: Any = None
        self._first = torch.empty(0)
        self._prompt = torch.tensor([prefill_prompt(folder)])

    def prepare(self, case: Case) -> None:
        if not case.steps:
            return
        prompts = torch.tensor(decode_prompts(self._folder, case.batch))
        with torch.inference_mode():
            out = self._model(prompts, use_cache=True, logits_to_keep=1)
        self._cache, self._first = out.cache, out.logits[:, -1:].argmax(-1)

    def window(self, case: Case) -> list[list[int]]:
        with torch.inference_mode():
            if not case.steps:
                out = self._model(self._prompt, use_cache=True, logits_to_keep=1)
                return out.logits[:, -1:].argmax(-1).tolist()
            if grown := self._cache.get_seq_length() - PROMPT:
                self._cache.crop(-grown)
            tokens, answers = self._first, []
            for _ in range(case.steps):
                out = self._model(tokens, cache=self._cache, use_cache=True)
                tokens = out.logits[:, -1:].argmax(-1)
                answers.append(tokens)
            return torch.cat(answers, 1).tolist()


SUBJECTS: dict[str, Any] = {"quiesce": Quiesce, "transformers": Transformers}
