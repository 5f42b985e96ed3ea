"""What an engine must offer to be lent to peer by peer: one agent for each, made, used and ended by one thread.

An `Engine` names a lane of NIXL, Mooncake or MORI with all its settings. The rest, who is attached, what may be
posted, what a failure means and what ends with an agent, is the same for all and not the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from quiesce.transfer.interface import Capabilities
from quiesce.transfer.window import Window

TRIAL_BYTES = 16
Direction = Literal["write", "read"]
Drain = Literal["none", "per_post", "flush"]


class MissingEngine(RuntimeError):
    """The engine's library cannot be loaded. The text says what to install, in one line."""


@dataclass(frozen=True)
class Limits:
    """What can be relied on, as measured. An agent's end is the end of that agent in the lender's process.

    `ending`: an agent's end proves that nothing of its peer lands any more. `ending_read`: so does it for a peer that
    reads, and it can be ended while it is read from. `death`: the end of the peer's process, seen through its pid, is
    what proves that. `diverts`: what arrives is stored by our own threads, so that remapping keeps reads of ours out.
    `flush`: a write that is PLACED proves that all that was lost before it on the same agents has landed.
    `ends_alone`: what is posted to an agent that is no more ends by itself, if only with an error; otherwise our own
    agent is ended under it, once nothing has been heard of it for a while. `ends_slowly`: the end of an agent takes a
    second, and bears that others are made and ended meanwhile.
    """

    ending: bool
    ending_read: bool
    death: bool
    diverts: bool
    flush: bool
    pages_in_flight: int  # of one batch; one batch is one operation of the engine
    batches_in_flight: int
    ends_alone: bool = True
    ends_slowly: bool = False


def claims(
    name: str,
    lane: str,
    *,
    drain: Drain = "none",
    fence: Literal["none", "peer"] = "none",
    placed_means: Literal["visible", "accepted"] = "visible",
    fences_readers: bool = True,
    measured: bool,
) -> Capabilities:
    """What every engine of this kind has, and of the rest what was measured on this lane."""
    return Capabilities(
        name=name,
        lane=lane,
        push=True,
        pull=True,
        gather=True,
        notify=False,
        failure_is_terminal=False,
        cancels_queued=True,
        blocking_post=False,
        drain=drain,
        fence=fence,
        fence_cost="none" if fence == "none" else "disrupts_peer",
        placed_means=placed_means,
        fences_readers=fences_readers,
        measured=measured,
    )


@dataclass(frozen=True)
class Far:
    """The lender's agent and its window: where page 0 is there, and its scratch bytes."""

    agent: bytes
    base: int
    scratch: int
    pages: int
    page_bytes: int

    def addresses(self, pages: np.ndarray) -> np.ndarray:
        """uint64 addresses of these pages."""
        return pages.astype(np.uint64) * np.uint64(self.page_bytes) + np.uint64(self.base)


class Lending(Protocol):
    """An agent at the lender, for one peer."""

    def describe(self) -> bytes:
        """What its peer needs to reach it, at most some KiB."""

    def end(self) -> None:
        """Returns when the agent is no more. Raises when that is not sure: then nothing is proven."""


class Posting(Protocol):
    """An agent at the poster, joined to one `Lending`. Any exception means that nothing is known of the batch."""

    def post(self, direction: Direction, own: np.ndarray, theirs: np.ndarray) -> object:
        """Starts moving each own page from or to its far one (numbers of pages, int64 [n]). May block to the end."""

    def touch(self) -> object:
        """A batch as well: starts writing the first TRIAL_BYTES of the own scratch to the far one."""

    def over(self, batch: object) -> bool:
        """Whether it is all in its place. A batch is asked about until this is true or raises, and not dropped."""

    def end(self) -> None:
        """Called when no batch is under way, or to leave the process."""


class Engine(Protocol):
    @property
    def caps(self) -> Capabilities: ...

    @property
    def limits(self) -> Limits: ...

    def check(self) -> None:
        """Loads the library. Raises MissingEngine, or ValueError for settings that cannot work."""

    def timeouts(self) -> list[str]:
        """Timeouts of the engine's own that could fire before ours, for people: what one tells is never a proof."""

    def lend(self, window: Window) -> Lending: ...

    def join(self, window: Window, far: Far) -> Posting:
        """Raises ValueError for an agent's description that does not fit."""
