"""What is measured: the same prompts and the same steps for every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

PROMPT = 129  # tokens of a decode case's prompts: one more than a whole block of vLLM's, which then is in its cache
OUT = 128  # tokens of a whole request's prompt, and of its answer
TEXT = (
    "The lighthouse keeper wrote down the weather each morning, and each evening he read what he had written. "
    "In the first year the pages told of storms, of ships that passed far out, and of birds that came in spring. "
    "A visitor asked him once what the book was for; he answered that a day which nobody writes down is soon lost. "
)


@dataclass(frozen=True)
class Case:
    """One figure of one window of work.

    decode: `batch` requests whose prompts are in the cache decode `steps` tokens each. prefill: one prompt is
    computed, and its first token drawn. requests: `batch` whole requests at once, prompt and answer of `steps`.
    """

    name: str
    kind: Literal["decode", "prefill", "requests"]
    batch: int
    prompt: int
    steps: int = 0
    rivals: tuple[str, ...] = ()  # who takes part, as in bench.peers

    @property
    def context(self) -> int:
        """Mean number of tokens that a computed token of the window looks at."""
        return self.prompt // 2 if self.kind == "prefill" else self.prompt + self.steps // 2


EVERY = ("quiesce", "vllm", "vllm float32", "llama.cpp", "transformers")
CASES = (
    Case("decode-1", "decode", 1, PROMPT, 48, EVERY),
    Case("decode-8", "decode", 8, PROMPT, 16, EVERY),
    Case("decode-32", "decode", 32, PROMPT, 12, EVERY),
    Case("decode-64", "decode", 64, PROMPT, 8, EVERY[:4]),
    Case("prefill-128", "prefill", 1, 128, 0, EVERY),
    Case("prefill-512", "prefill", 1, 512, 0, EVERY),
    Case("prefill-2048", "prefill", 1, 2048, 0, EVERY[:4]),
    Case("prefill-8000", "prefill", 1, 8000, 0, EVERY[:4]),
    Case("requests-32", "requests", 32, OUT, OUT, EVERY[:4]),
    Case("int8-decode-1", "decode", 1, PROMPT, 48, ("quiesce int8", "llama.cpp Q4_1")),
    Case("int8-decode-8", "decode", 8, PROMPT, 16, ("quiesce int8", "llama.cpp Q4_1")),
    Case("int4-decode-1", "decode", 1, PROMPT, 48, ("quiesce int4", "llama.cpp Q4_1")),
    Case("int4-decode-8", "decode", 8, PROMPT, 16, ("quiesce int4", "llama.cpp Q4_1")),
)


class Prompts:
    """Token ids of real text. No two requests of a run share a beginning, unless it is the same window's again."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ids = list(tokenizer.encode(TEXT * 150, add_special_tokens=False).ids)

    def of(self, case: Case, number: int) -> list[list[int]]:
        """Of window `number`; a decode case's are those of all its windows, since they are computed before."""
        again = 0 if case.kind == "decode" else number
        return [self.one(case.prompt, 100 * again + row) for row in range(case.batch)]

    def one(self, length: int, number: int) -> list[int]:
        begin = [1000 + number % 10000, 1000 + number // 10000]
        return (begin + self._ids[11 * number % 500 :])[:length]


def chosen(names: list[str], peers: list[str]) -> list[Case]:
    """The named cases, all for none, with only those of `peers` that take part; Quiesce always does."""
    found = []
    for case in CASES:
        if names and case.name not in names:
            continue
        rivals = tuple(peer for peer in case.rivals if peer in peers)
        if any(peer.startswith("quiesce") for peer in rivals):
            found.append(replace(case, rivals=rivals))
    return found
