"""Log-probabilities as the model gave them: before temperature, penalties, bias and cuts."""

from __future__ import annotations

import numpy as np

from quiesce.core.messages import TokenLogprob

MARGINS = (8.0, np.inf)  # how far below the best alternatives are looked for, in turn


def ranked(logits: np.ndarray, floor: float) -> np.ndarray:
    """Ids (int64) of the logits >= `floor`, highest first, ties by id: one sort of (value, id) packed in 64 bits."""
    ids = np.flatnonzero(logits >= floor)
    bits = (logits[ids] + np.float32(0)).view(np.uint32)  # + 0 makes -0 equal to 0
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = (~rising).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def mass(logits: np.ndarray, best: np.floating, temperature: float) -> float:
    """The sum of exp((logit - best) / temperature): float32 terms, float64 sum."""
    return float(np.exp((logits - best) / np.float32(temperature)).sum(dtype=np.float64))


def token_logprob(logits: np.ndarray, token: int, alternatives: int) -> TokenLogprob:
    """Of `token` and of the `alternatives` best tokens, for finite float32 `logits` [vocab]."""
    best = logits.max()
    log_mass = float(np.log(mass(logits, best, 1.0)))

    def of(number: int) -> float:
        return float(logits[number] - best) - log_mass

    count = min(alternatives, logits.shape[0])
    if count <= 0:
        return TokenLogprob(of(token))
    for margin in MARGINS:
        near = logits[logits >= best - margin]
        if near.shape[0] >= count:
            break
    # the smallest of the `count` best bounds what must be sorted; ties at that value are settled by id
    floor = np.partition(near, near.shape[0] - count)[near.shape[0] - count]
    top = ranked(logits, float(floor))[:count]
    return TokenLogprob(of(token), tuple((int(number), of(int(number))) for number in top))
