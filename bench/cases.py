"""What is measured: the same prompts and the same steps for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

PROMPT = 128  # tokens in the cache before a decode window begins
PREFILL = 512
TEXT = (
    "The lighthouse keeper wrote down the weather each morning, and each evening he read what he had written. "
    "In the first year the pages told of storms, of ships that passed far out, and of birds that came in spring. "
    "A visitor asked him once what the book was for; he answered that a day which nobody writes down is soon lost. "
)


@dataclass(frozen=True)
class Case:
    """One figure. `batch` requests decode `steps` tokens each from PROMPT on, or (steps 0) one prompt is computed."""

    name: str
    batch: int
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed in one window."""
        return self.batch * self.steps if self.steps else PREFILL

    @property
    def context(self) -> int:
        """Mean number of tokens that a computed token of the window looks at."""
        return PROMPT + self.steps // 2 if self.steps else PREFILL // 2


CASES = (Case("decode 1", 1, 64), Case("decode 8", 8, 16), Case("prefill 512", 1))


def decode_prompts(folder: Path, batch: int) -> list[list[int]]:
    """`batch` different prompts of PROMPT tokens each."""
    ids = _ids(folder)
    return [ids[11 * row : 11 * row + PROMPT] for row in range(batch)]


def prefill_prompt(folder: Path) -> list[int]:
    return _ids(folder)[:PREFILL]


def _ids(folder: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(TEXT * 20, add_special_tokens=False).ids)
