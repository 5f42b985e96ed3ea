"""What is let in: limits before the hand-off, promises against the pool, one rule for both legs (guards D1, D3).

Nothing here waits and nothing here guesses: a request either fits the limits or is refused with the limit's name;
it either fits the pool now or queues.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiesce.core.fingerprint import Limits
from quiesce.core.messages import TransferId


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that must never enter a hand-off. `status` and `reason` go to the client."""

    status: int
    reason: str


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def effective_limit(*limits: Limits) -> int:
    """Tokens of prompt + answer that every one of these workers can take (guard D3)."""
    return min(min(limit.context_length, limit.pool_tokens) for limit in limits)


def refuse_pool(context_length: int, pool_tokens: int, what: str) -> str | None:
    """The start-up check of guard D3: why this pool must not be started, or None."""
    if pool_tokens >= context_length:
        return None
    return (
        f"the {what} pool holds {pool_tokens} tokens but the context length is {context_length}: a prompt that "
        f"is within the limit could never be placed. Raise --max-total-tokens or lower --context-length to "
        f"at most {pool_tokens}."
    )


def check(prompt_tokens: int, max_tokens: int, limit: int) -> Refusal | None:
    """The one length rule, the same on router, prefill and decode (guard D1)."""
    if prompt_tokens < 1:
        return Refusal(400, "the prompt is empty")
    if max_tokens < 1:
        return Refusal(400, f"max_tokens must be at least 1, not {max_tokens}")
    if prompt_tokens >= limit:
        return Refusal(400, f"the prompt has {prompt_tokens} tokens; the limit is {limit} with the answer")
    if prompt_tokens + max_tokens > limit:
        return Refusal(
            400, f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the limit of {limit}"
        )
    return None


class Promises:
    """Pages that running requests may still need, so that whoever is admitted can finish.

    A promise covers a request from admission to its end. Pages held by ended requests are the caller's to
    subtract: they come back on proof, at a time nobody can name."""

    def __init__(self, total_pages: int) -> None:
        self.total = total_pages
        self.promised = 0
        self._by_request: dict[TransferId, int] = {}

    def fits(self, pages: int, held: int = 0) -> bool:
        return self.promised + held + pages <= self.total

    def make(self, tid: TransferId, pages: int) -> None:
        assert tid not in self._by_request
        self._by_request[tid] = pages
        self.promised += pages

    def end(self, tid: TransferId) -> None:
        """Idempotent (guard D2)."""
        self.promised -= self._by_request.pop(tid, 0)

    def __len__(self) -> int:
        return len(self._by_request)
