"""Quiesce's engine as a worker drives it: rows and page tables in, tokens out."""

from __future__ import annotations

from pathlib import Path

from bench.offline import Work
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine

PAGE, PAGES = 16, 1024
CHUNK = 512  # prompt tokens of a step, as `quiesce serve` has it by default
GREEDY = Sampling(max_tokens=1)


class QuiesceEngine:
    def __init__(self, model: str, dtype: str, quantization: str) -> None:
        self._engine = Engine(
            Path(model), dtype=dtype, page_size=PAGE, pool_pages=PAGES, threads=1, quantization=quantization
        )
        self._prompts: list[list[int]] = []
        self._first: list[int] = []

    def begin(self, work: Work) -> None:
        if work.kind != "decode":
            self._prompts = []  # what a window writes is not what a decode case left
        elif work.prompts != self._prompts:
            self._prompts = work.prompts
            self._first = [self._prefill(prompt, self._table(row, work)) for row, prompt in enumerate(work.prompts)]

    def window(self, work: Work) -> list[list[int]]:
        if work.kind == "prefill":
            return [[self._prefill(work.prompts[0], list(range(PAGES)))]]
        if work.kind == "requests":
            wish = Sampling(max_tokens=work.steps, ignore_eos=True)
            return LocalEngine(self._engine).generate(
                work.prompts, [wish] * len(work.prompts), chunk=CHUNK, concurrency=len(work.prompts)
            )
        tables = [self._table(row, work) for row in range(len(work.prompts))]
        tokens, answers, start = self._first, [], len(work.prompts[0])
        for at in range(start, start + work.steps):
            rows = [Row([token], at, table, GREEDY) for token, table in zip(tokens, tables, strict=True)]
            tokens = [token for token in self._engine.step(rows) if token is not None]
            answers.append(tokens)
        return [list(answer) for answer in zip(*answers, strict=True)]

    def _table(self, row: int, work: Work) -> list[int]:
        each = PAGES // len(work.prompts)
        return list(range(row * each, row * each + each))

    def _prefill(self, prompt: list[int], table: list[int]) -> int:
        for at in range(0, len(prompt), CHUNK):
            last = at + CHUNK >= len(prompt)
            drawn = self._engine.step([Row(prompt[at : at + CHUNK], at, table, GREEDY if last else None)])
        assert drawn[0] is not None
        return drawn[0]


def open_subject(model: str, dtype: str, quantization: str = "none") -> QuiesceEngine:
    return QuiesceEngine(model, dtype, quantization)
