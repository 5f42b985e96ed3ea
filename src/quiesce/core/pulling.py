"""What the two sides of a pull know of a transfer, and the events they hear beside those of push (protocol, 5a)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quiesce.core.lending import Published, State, Transfer
from quiesce.core.messages import FirstToken, Leg, Request, TransferId
from quiesce.core.posting import Chunk

# The states of push, by the names that they have in pull.
COMPUTING, LENT = State.RESERVED, State.OFFERED  # of the side that lends
ASKED, READING, CHECK, GIVEN_UP = State.RESERVED, State.OFFERED, State.LANDED, State.HOLDING  # of the reader


@dataclass(slots=True)
class Asked(Transfer):
    """The reader's view of a transfer."""

    requests: dict[int, Request] = field(default_factory=dict)  # by prefill rank; empty: nobody was asked yet


@dataclass(slots=True)
class Reading(Published):
    """One prefill rank whose pages are being read."""

    queue: deque[Chunk] = field(default_factory=deque)
    posts: set[int] = field(default_factory=set)  # numbers of reads made and not yet terminal
    stop: bool = False
    asked: bool = False  # an ABORT waits for its answer
    acked: bool = False  # FAILED was heard, or nobody is left to hear it
    checked: bool = False

    @property
    def count(self) -> int:
        """Reads made and not yet terminal: the only thing that speaks (guard A1)."""
        return len(self.posts)


# ---------------------------------------------------------------- events of the side that lends


@dataclass(frozen=True, slots=True)
class Computed:
    """Every page of the prompt is filled. `pairing` is the digest of what was computed (guard L9); `result` on the
    designated rank only (guard L6)."""

    tid: TransferId
    pairing: bytes
    tokens: int
    region: int
    generation: int  # under which the transport lets this reader in now
    remaining_ms: int
    result: FirstToken | None


@dataclass(frozen=True, slots=True)
class ReaderUp:
    epoch: int


# ---------------------------------------------------------------- events of the reader


@dataclass(frozen=True, slots=True)
class Ask:
    """The requests to all its ranks are about to be sent."""

    tid: TransferId
    remaining_ms: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What the source said of the grant, looked at after `CheckGrant`: its epoch, and the generation under which the
    pages are lent. None: they are not, or nobody could be asked."""

    leg: Leg
    epoch: int
    generation: int | None
