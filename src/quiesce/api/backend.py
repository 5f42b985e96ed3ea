"""What the HTTP side needs of whoever runs the requests. The router implements it; tests may."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from quiesce.api.errors import ApiError
from quiesce.core.messages import Inspected, Sampling


class Ask(msgspec.Struct, frozen=True):
    """One generation. `rid` is minted by us; `label` is the client's own id and pairs nothing."""

    rid: str
    label: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float  # of the running event loop's clock, seconds


class Verdict(msgspec.Struct, frozen=True):
    """The one last word on a request: a finish reason, or an error."""

    finish_reason: Literal["stop", "length"] | None = None
    error: ApiError | None = None
    cached_tokens: int = 0


class Delivery(msgspec.Struct, frozen=True):
    token_ids: list[int]
    verdict: Verdict | None = None  # when set, nothing follows


class Call(Protocol):
    """A running request."""

    async def next(self) -> Delivery:
        """All tokens that arrived since the last call; waits for at least one or the verdict."""

    def satisfied(self) -> None:
        """The answer is whole (a stop string was found): end the work, it counts as a success."""

    def abandon(self, reason: str) -> None:
        """The client is gone: end the work. Harmless after the verdict."""


class Backend(Protocol):
    def context_limit(self) -> int | None:
        """Tokens of prompt + answer that every usable pair can take; None while there is no pair."""

    def refusal(self) -> ApiError | None:
        """Why no new work is taken just now, or None."""

    def open(self, ask: Ask) -> Call:
        """Sends the request to workers. Raises ApiError (503) when that cannot be done."""

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(can answer, detail for people and probes as JSON-able)"""

    async def inspect(self, timeout: float) -> dict[str, Inspected | str]:
        """Worker name -> its answer, or why there is none."""

    def counters(self) -> dict[str, int]:
        """Counters of the router for /metrics: name -> value."""

    def legs(self) -> dict[str, int]:
        """Worker name -> legs it has not ended yet."""
