"""What a request's own history and wishes do to its logits before a token is drawn from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from quiesce.core.messages import Sampling

FORBIDDEN = np.float32("-inf")


def needs_history(sampling: Sampling) -> bool:
    """Whether a draw depends on which tokens came before, or on how many of them are the answer."""
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.min_tokens > 0
        or sampling.grammar
    )


def stopping(sampling: Sampling, eos_ids: Collection[int]) -> set[int]:
    """The tokens that end this request's answer."""
    return set(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_ids)


def penalised(
    logits: np.ndarray,
    sampling: Sampling,
    history: Sequence[int],
    prompt_tokens: int,
    eos_ids: Collection[int],
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """`logits` (float32 [vocab]) as `sampling` wants them, -inf where a token is forbidden; a copy if changed.

    In this order: repetition penalty (every token of `history`: a positive logit is divided by it, another
    multiplied), presence and frequency penalty (tokens after the first `prompt_tokens` of `history`),
    bias, until `min_tokens` are there no token that would end the answer, and nothing but what is `allowed`
    (bool [vocab]). The grammar wins: when `min_tokens` forbids all that it allows, that is allowed.
    """
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    out = logits
    if needs_history(sampling) or sampling.logit_bias:
        out = logits.copy()
    if sampling.repetition_penalty != 1:
        seen = np.array(history, np.int64)
        old, penalty = out[seen], np.float32(sampling.repetition_penalty)
        out[seen] = np.where(old > 0, old / penalty, old * penalty)
    if (presence or frequency) and len(history) > prompt_tokens:
        answered, counts = np.unique(np.array(history[prompt_tokens:], np.int64), return_counts=True)
        out[answered] -= (presence + frequency * counts).astype(np.float32)
    for token, bias in sampling.logit_bias:
        out[token] += np.float32(bias)
    if sampling.min_tokens > max(0, len(history) - prompt_tokens):
        out[list(stopping(sampling, eos_ids))] = FORBIDDEN
    if allowed is None:
        return out
    masked = np.where(allowed, out, FORBIDDEN)
    return masked if masked.max() > FORBIDDEN else np.where(allowed, logits, FORBIDDEN)
