"""Draws the next token. The randomness of a token is a function of (seed, absolute position) and nothing else."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from quiesce.core.messages import Sampling
from quiesce.engine.errors import EngineError

MARGINS = (8.0, 16.0, np.inf)  # how far below the best (in units of temperature) candidates reach, in turn
GREEDY_BELOW = 1e-5  # a temperature under this is 0
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """`logprob` is the natural log-probability under the unmodified model, when it was asked for."""

    token: int
    logprob: float | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` (0-based, absolute), the same in every process."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & MASK, position)) >> 11) * 2.0**-53


def check_sampling(sampling: Sampling) -> None:
    """Raises EngineError for settings that mean nothing."""
    if not 0 <= sampling.temperature < float("inf"):
        raise EngineError(f"temperature must be 0 or more, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise EngineError(f"top_k must be 0 (all) or more, not {sampling.top_k}")


def sample(logits: np.ndarray, sampling: Sampling, position: int, *, logprob: bool = False) -> Sampled:
    """The token at `position` for finite float32 `logits` [vocab]; the lowest id wins a tie."""
    if sampling.temperature < GREEDY_BELOW:
        token = int(logits.argmax())
    else:
        token = _draw(logits, sampling, uniform(sampling.seed, position))
    return Sampled(token, _logprob(logits, token) if logprob else None)


def _draw(logits: np.ndarray, sampling: Sampling, chance: float) -> int:
    """Inverse CDF over tokens in falling order of probability, ties by id.

    Only candidates near the best are sorted. They are a true prefix of the whole order, so reaching
    further down, when the draw falls beyond them, never changes what a nearer draw would have given.
    """
    best = logits.max()
    kept = min(sampling.top_k or logits.shape[0], logits.shape[0])
    whole = 0.0 if sampling.top_k else _mass(logits, best, sampling.temperature)
    for margin in MARGINS:
        ids = _ranked(logits, best - margin * sampling.temperature)[:kept]
        reach = np.cumsum(np.exp((logits[ids].astype(np.float64) - best) / sampling.temperature))
        settled = ids.shape[0] == kept  # all that top-k (or the vocabulary) allows is here
        if sampling.top_k and not settled:
            continue
        total = reach[-1] if sampling.top_k else whole
        if sampling.top_p < 1:
            nucleus = sampling.top_p * total
            if reach[-1] < nucleus and not settled:
                continue
            reach = reach[: int(np.searchsorted(reach, nucleus)) + 1]
            total, settled = reach[-1], True
        at = int(np.searchsorted(reach, chance * total, side="right"))
        if at < reach.shape[0] or settled:
            return int(ids[min(at, reach.shape[0] - 1)])
    raise AssertionError("the last margin takes in every token")


def _ranked(logits: np.ndarray, floor: float) -> np.ndarray:
    """Ids of the logits >= `floor`, highest first, ties by id. One sort of (value, id) packed in 64 bits."""
    ids = np.flatnonzero(logits >= floor)
    bits = (logits[ids] + np.float32(0)).view(np.uint32)  # + 0 makes -0 equal to 0
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = (~rising).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _mass(logits: np.ndarray, best: np.floating, temperature: float) -> float:
    """The sum of exp((logit - best) / temperature): float32 terms, pairwise float32 sum."""
    return float(np.exp((logits - best) / np.float32(temperature)).sum())


def _logprob(logits: np.ndarray, token: int) -> float:
    best = logits.max()
    return float(logits[token] - best) - float(np.log(_mass(logits, best, 1.0)))
