"""Feeds prompts to an engine in chosen chunks and collects logits."""

import random
from collections.abc import Sequence

import numpy as np

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine

GREEDY = Sampling(max_tokens=1)


def prompt_of(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, vocab) for _ in range(length)]


def scattered_pages(engine: Engine, tokens: int, seed: int = 0) -> list[int]:
    """Distinct pages in no order, enough for `tokens`."""
    return random.Random(seed).sample(range(engine.kv.pages), -(-tokens // engine.kv.page_size))


def last_logits(engine: Engine, prompt: Sequence[int], chunks: Sequence[int], pages: Sequence[int]) -> np.ndarray:
    """Logits after the whole prompt, computed in `chunks` (their sum is the prompt's length)."""
    assert sum(chunks) == len(prompt)
    start, logits = 0, np.empty((0, 0), np.float32)
    for size in chunks:
        _, logits = engine.logits([Row(prompt[start : start + size], start, pages, GREEDY)])
        start += size
    return logits[0]
