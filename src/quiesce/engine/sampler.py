"""Draws the next token. The randomness of a token is a function of (seed, absolute position) and nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import xxhash

from quiesce.core.messages import Sampling, TokenLogprob
from quiesce.engine.errors import EngineError
from quiesce.engine.logprobs import mass, ranked, token_logprob
from quiesce.engine.penalties import penalised, stopping

MARGINS = (8.0, 16.0, np.inf)  # how far below the best (in units of temperature) candidates reach, in turn
GREEDY_BELOW = 1e-5  # a temperature under this is 0
LOWEST = float(np.finfo(np.float32).min)  # of what may be drawn: a forbidden token is -inf
MASK = (1 << 64) - 1
LARGEST = 1e6  # keeps sums finite in float32
RANGES = {
    "temperature": (0, LARGEST),
    "top_p": (0, 1),
    "top_k": (0, LARGEST),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-LARGEST, LARGEST),
    "frequency_penalty": (-LARGEST, LARGEST),
    "min_tokens": (0, math.inf),
    "logprobs": (0, LARGEST),
    "prompt_logprobs": (0, LARGEST),
}


class Sampled(msgspec.Struct, frozen=True):
    """`logprob` is there when `Sampling.logprobs` is; it is the model's, before anything the request changed."""

    token: int
    logprob: TokenLogprob | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` (0-based, absolute), the same in every process."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed & MASK, position)) >> 11) * 2.0**-53


def check_sampling(sampling: Sampling, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Raises EngineError for settings that mean nothing to a model of `vocab_size` tokens."""
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            raise EngineError(f"{name} must be within {low:g} and {high:g}, not {value}")
    if not sampling.top_p:
        raise EngineError("top_p must be above 0")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size or not abs(bias) <= LARGEST:
            raise EngineError(f"logit_bias of token {token} by {bias}: tokens are 0..{vocab_size - 1}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise EngineError(f"stop token {token} is outside 0..{vocab_size - 1}")
    if sampling.grammar and sampling.ignore_eos:
        raise EngineError("ignore_eos and a grammar exclude each other: the end of the grammar ends the answer")
    if sampling.min_tokens and len(stopping(sampling, eos_ids)) >= vocab_size:
        raise EngineError(f"min_tokens = {sampling.min_tokens}, but every token would end the answer")


def sample(
    logits: np.ndarray,
    sampling: Sampling,
    position: int,
    *,
    history: Sequence[int] = (),
    prompt_tokens: int = 0,
    eos_ids: Collection[int] = (),
    allowed: np.ndarray | None = None,
) -> Sampled:
    """The token at `position` for finite float32 `logits` [vocab]; the lowest id wins a tie.

    `history` is every token before it, of which `prompt_tokens` are the prompt's (only where
    `penalties.needs_history`). Temperature comes after penalties, bias and min_tokens; then min-p, then
    top-k, then top-p of what is left. `allowed`: bool [vocab], what the answer's grammar lets follow.
    """
    wanted = penalised(logits, sampling, history, prompt_tokens, eos_ids, allowed)
    if sampling.temperature < GREEDY_BELOW:
        token = int(wanted.argmax())
    else:
        token = _draw(wanted, sampling, uniform(sampling.seed, position))
    return Sampled(token, None if sampling.logprobs is None else token_logprob(logits, token, sampling.logprobs))


def _draw(logits: np.ndarray, sampling: Sampling, chance: float) -> int:
    """Inverse CDF over tokens in falling order of probability, ties by id.

    Only candidates near the best are sorted. They are a true prefix of the whole order, so reaching
    further down, when the draw falls beyond them, never changes what a nearer draw would have given.
    """
    best, floor = logits.max(), LOWEST
    if sampling.min_p:
        floor = max(floor, float(best) + sampling.temperature * math.log(sampling.min_p))
    kept = min(sampling.top_k or logits.shape[0], logits.shape[0])
    whole = 0.0
    if not sampling.top_k:
        whole = mass(logits[logits >= floor] if sampling.min_p else logits, best, sampling.temperature)
    for margin in MARGINS:
        reached = max(float(best) - margin * sampling.temperature, floor)
        ids = ranked(logits, reached)[:kept]
        reach = np.cumsum(np.exp((logits[ids].astype(np.float64) - best) / sampling.temperature))
        settled = ids.shape[0] == kept or reached == floor  # all that top-k, min-p and the vocabulary allow is here
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
            return int(ids[at if at < reach.shape[0] else 0])  # what rounding left over goes to the best
    raise AssertionError("the last margin takes in every token")
