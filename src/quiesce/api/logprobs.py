"""Log-probabilities in the shapes of both endpoints, and the prompt's own in vLLM's shape."""

from __future__ import annotations

import msgspec

from quiesce.api.answer import Entry
from quiesce.api.detokenize import Vocabulary
from quiesce.core.messages import TokenLogprob

LEAST = -9999.0  # what OpenAI writes for the logarithm of nothing, which JSON has no number for


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists of one length. Alternatives with equal texts are one: the likeliest."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None  # 1 is the likeliest; null when it is not among the alternatives
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]


def chat_logprobs(vocabulary: Vocabulary, entries: list[Entry], top: int) -> ChatLogprobs:
    """`top`: how many alternatives were asked for; with any, the token itself is among them."""
    return ChatLogprobs([_chat_token(vocabulary, entry, top) for entry in entries])


def _chat_token(vocabulary: Vocabulary, entry: Entry, top: int) -> ChatToken:
    assert entry.logprob is not None  # an answer's tokens all have one
    text, raw = vocabulary.shown(entry.token)
    alternatives = _alternatives(entry.token, entry.logprob, top) if top else []
    shown = [(vocabulary.shown(id), logprob) for id, logprob in alternatives]
    return ChatToken(
        text,
        _finite(entry.logprob.logprob),
        list(raw),
        [TopToken(said, _finite(logprob), list(bits)) for (said, bits), logprob in shown],
    )


def completion_logprobs(vocabulary: Vocabulary, entries: list[Entry], top: int) -> CompletionLogprobs:
    """The token itself is always among its alternatives."""
    return CompletionLogprobs(
        tokens=[vocabulary.shown(entry.token)[0] for entry in entries],
        token_logprobs=[_finite(entry.logprob.logprob) if entry.logprob else None for entry in entries],
        top_logprobs=[_top(vocabulary, entry, top) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _top(vocabulary: Vocabulary, entry: Entry, top: int) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for id, logprob in _alternatives(entry.token, entry.logprob, top):
        found.setdefault(vocabulary.shown(id)[0], _finite(logprob))
    return found


def prompt_logprobs(
    vocabulary: Vocabulary, ids: tuple[int, ...], found: list[TokenLogprob | None], top: int
) -> PromptTokens:
    """One for each token of the prompt: token id -> its log-probability; null for the first token."""
    lines: PromptTokens = []
    for token, logprob in zip(ids, found, strict=True):
        if logprob is None:
            lines.append(None)
            continue
        ranks = {id: rank for rank, (id, _) in enumerate(logprob.top, start=1)}
        lines.append(
            {
                str(id): PromptToken(_finite(value), ranks.get(id), vocabulary.shown(id)[0])
                for id, value in _alternatives(token, logprob, top)
            }
        )
    return lines


def _alternatives(token: int, found: TokenLogprob, top: int) -> list[tuple[int, float]]:
    """The likeliest `top`, and the token itself at the end when it is not one of them."""
    best = list(found.top[:top])
    return best if any(id == token for id, _ in best) else [*best, (token, found.logprob)]


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST
