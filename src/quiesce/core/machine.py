"""What the lender and the borrower machines share: the events that come in and the actions that go out.

`machine.on(event) -> list[Action]`. A timer is the action `Arm` and, later, the event `Fired`; the machine never
asks what time it is. A `Fired` for something that has moved on is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from quiesce.core.messages import FirstToken, Grant, HandOff, Leg, Ping, TransferId


class Timer(Enum):
    REPEAT = "repeat"  # 50 ms doubling to 2 s, jittered by whoever keeps the clock
    DEADLINE = "deadline"
    HOLD = "hold"  # --hold-timeout: starts a fence, never frees
    LEASE = "lease"  # pull: nothing was heard of the reader for so long
    REFENCE = "refence"  # a fence that was not to be had is asked for again, backed off


# ---------------------------------------------------------------- events both machines hear


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, with the epoch whose authenticated session it came over."""

    message: HandOff | Ping
    speaker: int


@dataclass(frozen=True, slots=True)
class Fired:
    timer: Timer
    about: TransferId | Leg
    attempt: int


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    to: int  # the peer's epoch; a message for an epoch that is gone is dropped by the sender
    message: HandOff


@dataclass(frozen=True, slots=True)
class Arm:
    """Replaces an earlier timer of the same kind about the same thing."""

    timer: Timer
    about: TransferId | Leg
    attempt: int = 0
    delay_ms: int | None = None  # None: the keeper's own delay for this kind and attempt


@dataclass(frozen=True, slots=True)
class Revoke:
    """Ask the transport for GONE (when `dead`) or FENCED of this peer. Answer each with exactly one `Revoked`, whose
    proof reaches `generation`, or else `NotRevoked`. `pages`: those in question, where a fence of pages can be had;
    None: all that the peer may touch."""

    epoch: int
    generation: int
    dead: bool
    pages: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare the landed pages with the digest that DONE carried; answer with `Verified`."""

    tid: TransferId
    digest: bytes


@dataclass(frozen=True, slots=True)
class CheckGrant:
    """Pull: look whether this grant is still in force at its source; answer with `Checked`. Asked for after the last
    PLACED; what was looked at earlier is no answer (guard L10)."""

    leg: Leg
    grant: Grant


@dataclass(frozen=True, slots=True)
class Committed:
    """Every page is in place and nothing more will land: the request may join a batch."""

    tid: TransferId
    result: FirstToken


@dataclass(frozen=True, slots=True)
class Lost:
    """The transfer is given up; its request ends with this reason. Said once, the first cause wins."""

    tid: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Every lease is closed and everything has been returned."""

    tid: TransferId


@dataclass(frozen=True, slots=True)
class Opened:
    """The borrower accepted an offer: pair it with a request and compute."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Post:
    """One post to make now: a write in push, a read in pull. Already counted; answer with exactly one `PostEnded`."""

    leg: Leg
    number: int
    source: tuple[int, ...]
    destination: tuple[int, ...]
    grant: Grant


@dataclass(frozen=True, slots=True)
class TryDrain:
    """Ask the transport whether everything posted on this lender's connection has landed or never will."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Tell:
    """One rank of several tells its engine's leader what it has found out (guard H8)."""

    tid: TransferId
    what: Literal["landed", "failed", "proven"]
    cause: str = ""


class Stopped(NamedTuple):
    """The borrower will post nothing more for this leg: stop computing for it."""

    leg: Leg
    reason: str


Action = (
    Send | Arm | Revoke | Verify | CheckGrant | Committed | Lost | Closed | Opened | Post | TryDrain | Tell | Stopped
)  # fmt: skip
