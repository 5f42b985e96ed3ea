"""What the lender knows of a transfer, and the events it hears beside messages and timers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from quiesce.core.machine import Fired, Heard
from quiesce.core.messages import Done, Offer, TransferId
from quiesce.core.proofs import Proof

REFUSED = "prefill refused the transfer: "
PEER_FULL = f"{REFUSED}full"  # it remembers as many transfers as it may: nothing failed, there is no room now


class State(Enum):
    RESERVED = "reserved"
    OFFERED = "offered"
    LANDED = "landed"
    COMMITTED = "committed"
    HOLDING = "holding"
    QUARANTINE = "quarantine"


@dataclass(slots=True)
class Published:
    """One rank that may have seen the offer: what it was told and what is known of it."""

    offer: Offer
    done: Done | None = None
    proven: bool = False
    accepted: bool = False
    busy: bool = False
    tainted: bool = False
    lost: bool = False  # its epoch is dead or replaced: GONE is what to ask for
    deferrals: int = 0


@dataclass(slots=True)
class Transfer:
    tid: TransferId
    room: int
    pairing: bytes
    tokens: int  # slots that must be filled
    prefix: int
    ranks: dict[int, int]  # every prefill rank to be offered -> its epoch, bound for good
    state: State = State.RESERVED
    published: dict[int, Published] = field(default_factory=dict)
    cause: str | None = None
    repeats: int = 0
    accused: dict[int, int] = field(default_factory=dict)  # QUARANTINE: epoch -> generation whose fence is owed


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Publish:
    """The offer to one rank is about to be sent."""

    tid: TransferId
    rank: int
    region: int
    generation: int
    remaining_ms: int


@dataclass(frozen=True, slots=True)
class End:
    """The request ends, for whatever reason: client, router, deadline, fault. One door (guard H3)."""

    tid: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    tid: TransferId
    matches: bool
    # When it does not match: epochs of every peer that could have written. Empty: only a restart ends it.
    peers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The bound epoch is dead, replaced, or unreachable for good. Says nothing about its posts."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    proof: Proof


@dataclass(frozen=True, slots=True)
class NotRevoked:
    """The fence could not be had: nothing changes, asking goes on (guard H17)."""

    epoch: int
    generation: int
    pages: frozenset[int] | None = None  # as asked for


Event = Heard | Fired | Publish | End | Verified | PeerLost | Revoked | NotRevoked
