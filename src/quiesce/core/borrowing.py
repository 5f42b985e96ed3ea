"""What the borrower knows of a (transfer, lender rank), and the events it hears beside messages and timers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from quiesce.core.machine import Fired, Heard
from quiesce.core.messages import FirstToken, HandOff, Leg, Offer
from quiesce.core.posting import Chunk, Outcome


class State(Enum):
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"
    DONE = "done"
    TAINTED = "tainted"
    TOMBSTONE = "tombstone"


@dataclass(slots=True)
class Record:
    leg: Leg
    state: State = State.OPEN
    offer: Offer | None = None  # None only for a tombstone left by an ABORT that overtook its OFFER
    queue: deque[Chunk] = field(default_factory=deque)
    posts: set[int] = field(default_factory=set)  # numbers of posts made and not yet terminal
    tainted: bool = False
    stop: bool = False
    asked: bool = False  # an ABORT waits for its answer
    lent: bool = False  # source pages are lent to our own posts
    covered: bool = False  # the lender closed the id while we still count: forget at zero
    posted: int = 0  # pages
    paired: bool = False  # our own request is about the same prompt (guard L9)
    complete: bool = False  # the last chunk has been handed in
    tokens: int = 0
    result: FirstToken | None = None
    digest: bytes | None = None
    answer: HandOff | None = None  # what a repeated OFFER or a REPEAT timer says again
    acked: bool = False
    repeats: int = 0

    @property
    def count(self) -> int:
        """Posts made and not yet terminal: the only thing that speaks (guard A1)."""
        return len(self.posts)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Paired:
    """The request for this room has come: what its own digest is (guard L9)."""

    leg: Leg
    pairing: bytes


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The compute that fills these pages has finished (guard L1)."""

    leg: Leg
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Complete:
    """That was the last chunk. `result` on the designated rank only (guard L6)."""

    leg: Leg
    tokens: int
    result: FirstToken | None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class PostEnded:
    leg: Leg
    number: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fault:
    """A local failure: compute, deadline, router cancel, no request for the room."""

    leg: Leg
    reason: str


@dataclass(frozen=True, slots=True)
class DrainSaid:
    leg: Leg
    proven: bool


@dataclass(frozen=True, slots=True)
class LenderUp:
    epoch: int


@dataclass(frozen=True, slots=True)
class LenderGone:
    """The lender's process is dead or replaced, for good: as on ABORT, unanswered. Never for a lost connection."""

    epoch: int


Event = Heard | Fired | Paired | ChunkReady | Complete | PostEnded | Fault | DrainSaid | LenderUp | LenderGone
