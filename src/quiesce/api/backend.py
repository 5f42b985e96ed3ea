"""What the HTTP side needs of whoever runs the requests. The router implements it; tests may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from quiesce.api.errors import ApiError
from quiesce.core.messages import Inspected, Sampling, TokenLogprob


class Bootstrap(msgspec.Struct, frozen=True):
    """How somebody else's router has paired a leg: the prefill worker's address, and the room."""

    host: str
    port: int | None
    room: int


class Ask(msgspec.Struct, frozen=True):
    """One answer to one prompt. `rid` is minted by us; `label` is the client's own id and pairs nothing.

    Asks with one `group` (when not empty) are samples of one prompt.
    """

    rid: str
    label: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float  # of the running event loop's clock, seconds
    group: str = ""
    priority: int = 0  # lower is served first
    tenant: str = ""  # whose budgets it uses: the name of its API key, never what a client says of itself
    exact: bool = True  # drawn greedily or from the client's own seed: another worker would go on the same way
    bootstrap: Bootstrap | None = None  # on the ports of single workers
    salt: str = ""  # prompts with different ones share nothing: a tenant's name, and what its client added


class Verdict(msgspec.Struct, frozen=True):
    """The one last word on an answer: a finish reason, or an error."""

    finish_reason: Literal["stop", "length"] | None = None
    error: ApiError | None = None
    cached_tokens: int = 0


class Delivery(msgspec.Struct, frozen=True):
    """What has arrived of one answer."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one for each token when they were asked for
    prompt: list[TokenLogprob | None]  # all of them, in the first delivery, when they were asked for
    verdict: Verdict | None = None  # when set, nothing follows


class Work(Protocol):
    """The answers of one client request, running. One that fails ends all."""

    async def next(self) -> list[Delivery]:
        """All that arrived since the last call, at most one delivery for each answer; waits for at least one."""

    def satisfied(self, index: int) -> None:
        """This answer is whole (a stop string was found): end its work, it counts as a success."""

    def abandon(self, reason: str) -> None:
        """The client is gone: end the work. Harmless after the verdicts."""


class Backend(Protocol):
    def context_limit(self) -> int | None:
        """Tokens of prompt + answer that every usable pair can take; None while there is no pair."""

    def refusal(self) -> ApiError | None:
        """Why no new work is taken just now, or None."""

    def open(self, asks: Sequence[Ask]) -> Work:
        """Sends all to workers, or none: then raises ApiError (503). Answers are numbered as their asks."""

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(can answer, detail for people and probes as JSON-able)"""

    async def probe(self, timeout: float) -> dict[str, float | str]:
        """Sends a test request through every worker. Worker name -> seconds it took, or why it did not pass."""

    def ready(self, role: str) -> bool:
        """Whether a worker of this role (prefill, decode, colocated) can be given work."""

    async def inspect(self, timeout: float, page: int | None = None) -> dict[str, Inspected | str]:
        """Worker name -> its answer, or why there is none. With a page: what its ownership log tells about it."""

    def counters(self) -> dict[str, int]:
        """Counters of the router for /metrics: name -> value."""

    def legs(self) -> dict[str, int]:
        """Worker name -> legs it has not ended yet."""
