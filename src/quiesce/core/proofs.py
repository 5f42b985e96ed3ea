"""Leases and what closes them (design, section 2; protocol, section 5).

A `Proof` says who can no longer touch what. A `Waiver` says nothing of the kind: it is an operator's wish.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quiesce.core.messages import Leg, TransferId


class Borrowing(Enum):
    """Who may touch the pages, and how."""

    WRITE = "write"  # a remote rank writes them (push destination)
    READ = "read"  # somebody reads them: our own posts (push source), a remote reader, a copy engine
    COMPUTE = "compute"  # our own engine step writes them
    RANKS = "ranks"  # nobody here: other ranks of this engine have not released theirs (guard H8)
    FOREIGN = "foreign"  # a writer we cannot name, found by its traces (guard H15)


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """One (transfer, borrowing rank, borrower's epoch). Leases are a set under this key, never a count."""

    tid: TransferId
    kind: Borrowing
    rank: int
    epoch: int

    @classmethod
    def write(cls, leg: Leg) -> LeaseKey:
        return cls(leg.tid, Borrowing.WRITE, leg.p_rank, leg.p_epoch)

    @classmethod
    def source(cls, leg: Leg) -> LeaseKey:
        return cls(leg.tid, Borrowing.READ, leg.d_rank, leg.tid.epoch)

    @classmethod
    def compute(cls, tid: TransferId) -> LeaseKey:
        return cls(tid, Borrowing.COMPUTE, 0, tid.epoch)

    @classmethod
    def ranks(cls, tid: TransferId) -> LeaseKey:
        return cls(tid, Borrowing.RANKS, -1, tid.epoch)

    @classmethod
    def foreign(cls, tid: TransferId) -> LeaseKey:
        return cls(tid, Borrowing.FOREIGN, -1, 0)


class ProofKind(Enum):
    COMPLETED = "completed"
    NEVER_STARTED = "never_started"
    DRAINED = "drained"
    FENCED = "fenced"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Proof:
    """`tid`, `rank` None: every transfer, every rank of that epoch. `generation`: leases granted under a later
    one are not covered. `pages` None: all pages of the lease."""

    kind: ProofKind
    epoch: int
    tid: TransferId | None = None
    rank: int | None = None
    generation: int | None = None
    pages: frozenset[int] | None = None

    @classmethod
    def spoken(cls, kind: ProofKind, key: LeaseKey) -> Proof:
        """COMPLETED, NEVER_STARTED or DRAINED, stated by the borrower's own epoch about one lease."""
        assert kind not in (ProofKind.FENCED, ProofKind.GONE)
        return cls(kind, key.epoch, key.tid, key.rank)

    @classmethod
    def fenced(cls, epoch: int, generation: int, pages: frozenset[int] | None = None) -> Proof:
        return cls(ProofKind.FENCED, epoch, generation=generation, pages=pages)

    @classmethod
    def gone(cls, epoch: int, generation: int) -> Proof:
        return cls(ProofKind.GONE, epoch, generation=generation)

    def covers(self, key: LeaseKey, generation: int) -> bool:
        """Guard H16: only the (transfer, rank, epoch) it is about, only generations it revoked."""
        if key.kind is Borrowing.FOREIGN:
            return self.kind is ProofKind.FENCED and self.tid == key.tid and self.epoch == 0
        return (
            self.epoch == key.epoch
            and (self.tid is None or self.tid == key.tid)
            and (self.rank is None or self.rank == key.rank)
            and (self.generation is None or generation <= self.generation)
        )


@dataclass(frozen=True, slots=True)
class Waiver:
    """Not a proof: the operator asked for `--on-hold-expiry=release`. Every use is counted as unsound."""

    reason: str
