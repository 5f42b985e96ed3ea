"""The lease ledger: the only way a page comes back to the pool.

Why is this page free again? Because its owner ended and every lease on it closed, each by exactly one proof.
Nothing else returns a page: no timer, no counter, no special case. A request's pages and its row are one
`Holding` and return together (guard H2).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from quiesce.core.messages import TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Borrowing, LeaseKey, Proof, Waiver

WRITING = (Borrowing.WRITE, Borrowing.COMPUTE, Borrowing.FOREIGN)
OUR_OWN = (Borrowing.COMPUTE, Borrowing.RANKS)
REMOTE_WRITERS = (Borrowing.WRITE, Borrowing.FOREIGN)


@dataclass(slots=True)
class Lease:
    key: LeaseKey
    generation: int
    pages: tuple[int, ...] | None  # None: every page of the holding, those it grows by later too


@dataclass(slots=True)
class Holding:
    """What one transfer has: its pages in logical order, its row, the leases on them."""

    pages: tuple[int, ...]
    rows: tuple[int, ...]
    extents: list[tuple[int, ...]]  # the same pages as the pool handed them out, and as it wants them back
    owned: bool = True
    retained: bool = False
    leases: dict[LeaseKey, Lease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Census:
    """Pages by state; always sums to the pool (`free + owned + cached + held + retained == total`)."""

    total: int
    free: int
    owned: int
    cached: int
    held: int
    retained: int
    rows_free: int
    rows_total: int


class LedgerError(AssertionError):
    """A rule of the ledger was about to be broken. Always a bug of the caller, never of a peer."""


class Change(NamedTuple):
    """What an observer hears of: the pages are those that it is about."""

    event: str  # owned, grown, lent, closed in part, closed, ended, retained, returned
    tid: TransferId
    pages: Collection[int]
    lease: Lease | None = None  # of the events about one
    closed_by: Proof | Waiver | None = None

    @property
    def of_a_step(self) -> bool:
        """About a lease of our own compute, which is taken and closed with each step or seat."""
        return self.lease is not None and self.lease.key.kind is Borrowing.COMPUTE


Released = Callable[[TransferId, tuple[int, ...]], None]
Observer = Callable[[Change], None]


class Ledger:
    """One per pool, used by one thread. `on_release` hears of every holding that returned, `observe` of every
    change."""

    def __init__(self, pool: PagePool, rows: PagePool, on_release: Released | None = None) -> None:
        self.pool = pool
        self.rows = rows
        self._return_pages = pool.claim_return()
        self._return_rows = rows.claim_return()
        self._holdings: dict[TransferId, Holding] = {}
        self._on_release = on_release
        self.observe: Observer | None = None
        self.closed_by: Counter[str] = Counter()  # proof kind -> leases, those of our own steps apart
        self.steps = 0  # leases of our own engine's steps and ranks that closed
        self.opened = 0
        self.unsound = 0
        self.stale = 0  # proofs that fitted no open lease
        self.faults: deque[Exception] = deque(maxlen=64)  # raised by a listener; what it was told of stands
        self._pages_in = Counter[str]()  # owned | held | retained -> pages

    # ------------------------------------------------------------ owning

    def own(self, tid: TransferId, pages: int, rows: int = 1) -> tuple[int, ...] | None:
        """Pages and row for a new holding, or None when there is not enough of either."""
        if tid in self._holdings:
            raise LedgerError(f"{tid} already has a holding; ids are never reused")
        if rows > self.rows.free:
            return None
        taken = self.pool.take(pages)
        if taken is None:
            return None
        row = self.rows.take(rows)
        assert row is not None
        self._holdings[tid] = Holding(taken, row, [taken])
        self._pages_in["owned"] += pages
        self._say("owned", tid, taken)
        return taken

    def grow(self, tid: TransferId, pages: int) -> tuple[int, ...] | None:
        """More pages for a running owner, or None when the pool has not that many."""
        holding = self._holdings[tid]
        if not holding.owned:
            raise LedgerError(f"{tid} has ended; it cannot grow")
        taken = self.pool.take(pages)
        if taken is not None:
            holding.pages += taken
            holding.extents.append(taken)
            self._pages_in["owned"] += pages
            self._say("grown", tid, taken)
        return taken

    def end(self, tid: TransferId) -> bool:
        """The owner is done with it. True: returned now. False: held until its leases close, or never known.
        Ending twice is harmless (guard D2)."""
        holding = self._holdings.get(tid)
        if holding is None or not holding.owned:
            return False
        holding.owned = False
        self._move(holding, "owned", "held")
        self._say("ended", tid, holding.pages)
        return self._release_if_free(tid, holding)

    # ------------------------------------------------------------ lending

    def lend(self, key: LeaseKey, generation: int = 0, pages: tuple[int, ...] | None = None) -> None:
        """Opens a lease. Recorded before anything that lets the borrower act (guard H4)."""
        holding = self._holdings.get(key.tid)
        if holding is None:
            raise LedgerError(f"{key.tid} has no holding to lend from")
        if not holding.owned and key.kind is not Borrowing.FOREIGN:
            raise LedgerError(f"{key.tid} has ended; nothing of it may be lent again")
        if key in holding.leases:
            raise LedgerError(f"lease {key} is open already")
        if pages is not None and pages is not holding.pages and not set(pages) <= set(holding.pages):
            raise LedgerError(f"lease {key} names pages that {key.tid} does not have")
        for lease in holding.leases.values():
            # A page that somebody remote may write has no reader and no step of our own (guard H1).
            if Borrowing.RANKS in (key.kind, lease.key.kind):
                continue  # keeps the pages, touches none
            apart = (key.kind in REMOTE_WRITERS) != (lease.key.kind in REMOTE_WRITERS)
            if apart and key.kind is not Borrowing.FOREIGN and _overlap(pages, lease.pages):
                raise LedgerError(f"lease {key} would share pages with {lease.key}: one writes remotely, one reads")
        lease = holding.leases[key] = Lease(key, generation, pages)
        self.opened += 1
        self._say("lent", key.tid, holding.pages if pages is None else pages, lease)

    def close(self, key: LeaseKey, proof: Proof) -> bool:
        """Closes one lease with the proof about it. False (counted stale): no such lease, or not its proof."""
        holding = self._holdings.get(key.tid)
        lease = None if holding is None else holding.leases.get(key)
        if holding is None or lease is None or not proof.covers(key, lease.generation):
            self.stale += 1
            return False
        if proof.pages is not None:
            # A fence of some pages counts for those only (guard H16).
            lent = holding.pages if lease.pages is None else lease.pages
            lease.pages = tuple([page for page in lent if page not in proof.pages])
            if lease.pages:
                self._say("closed in part", key.tid, proof.pages.intersection(holding.pages), lease, proof)
                return False
        del holding.leases[key]
        if key.kind in OUR_OWN:
            self.steps += 1
        else:
            self.closed_by[proof.kind.value] += 1
        self._say("closed", key.tid, lease.pages or holding.pages, lease, proof)
        self._release_if_free(key.tid, holding)
        return True

    def waive(self, key: LeaseKey, waiver: Waiver) -> bool:
        """Closes a lease on an operator's word. Unsound by name, counted as such."""
        holding = self._holdings.get(key.tid)
        lease = None if holding is None else holding.leases.pop(key, None)
        if holding is None or lease is None:
            return False
        assert waiver.reason
        self.unsound += 1
        self.closed_by["unsound"] += 1
        self._say("closed", key.tid, lease.pages or holding.pages, lease, waiver)
        self._release_if_free(key.tid, holding)
        return True

    def retain(self, tid: TransferId) -> None:
        """No proof is to be had for now: still held, and counted where operators look."""
        holding = self._holdings.get(tid)
        if holding is not None and not holding.owned and not holding.retained:
            holding.retained = True
            self._move(holding, "held", "retained")
            self._say("retained", tid, holding.pages)

    # ------------------------------------------------------------ looking

    def pages(self, tid: TransferId) -> tuple[int, ...]:
        return self._holdings[tid].pages

    def knows(self, tid: TransferId) -> bool:
        return tid in self._holdings

    def owns(self, tid: TransferId) -> bool:
        holding = self._holdings.get(tid)
        return holding is not None and holding.owned

    def leases(self, tid: TransferId) -> tuple[LeaseKey, ...]:
        holding = self._holdings.get(tid)
        return () if holding is None else tuple(holding.leases)

    def has(self, key: LeaseKey) -> bool:
        holding = self._holdings.get(key.tid)
        return holding is not None and key in holding.leases

    def open_leases(self) -> Iterator[Lease]:
        for holding in self._holdings.values():
            yield from holding.leases.values()

    def writers(self, page: int) -> list[LeaseKey]:
        """Who may write this page now (for the page map and for tests; linear)."""
        return [
            lease.key
            for holding in self._holdings.values()
            if page in holding.pages
            for lease in holding.leases.values()
            if lease.key.kind in WRITING and (lease.pages is None or page in lease.pages)
        ]

    def census(self) -> Census:
        return Census(
            total=self.pool.count,
            free=self.pool.free,
            owned=self._pages_in["owned"],
            cached=0,
            held=self._pages_in["held"],
            retained=self._pages_in["retained"],
            rows_free=self.rows.free,
            rows_total=self.rows.count,
        )

    def not_idle(self) -> list[str]:
        """Why this ledger is not idle, a line each; empty when it is. Leak checks, flushes, role switches,
        compaction and shutdown ask here (guard H10)."""
        lines = []
        for tid, holding in self._holdings.items():
            what = "owned" if holding.owned else "retained" if holding.retained else "held"
            open_leases = ", ".join(f"{key.kind.value} rank {key.rank}" for key in holding.leases)
            lines.append(f"{tid}: {len(holding.pages)} pages {what}; open leases: {open_leases or 'none'}")
        return lines

    # ------------------------------------------------------------ the way back

    def _release_if_free(self, tid: TransferId, holding: Holding) -> bool:
        if holding.owned or holding.leases:
            return False
        # Out of the table first: whatever goes wrong below cannot return it a second time (guard H9).
        del self._holdings[tid]
        self._pages_in["retained" if holding.retained else "held"] -= len(holding.pages)
        for taken in reversed(holding.extents):
            self._return_pages(taken)
        self._return_rows(holding.rows)
        self._say("returned", tid, holding.pages)
        if self._on_release is not None:
            self.tell(self._on_release, tid, holding.pages)
        return True

    def _move(self, holding: Holding, source: str, target: str) -> None:
        self._pages_in[source] -= len(holding.pages)
        self._pages_in[target] += len(holding.pages)

    def _say(
        self,
        event: str,
        tid: TransferId,
        pages: Collection[int],
        lease: Lease | None = None,
        closed_by: Proof | Waiver | None = None,
    ) -> None:
        if self.observe is not None:
            self.tell(self.observe, Change(event, tid, pages, lease, closed_by))

    def tell(self, listener: Callable[..., None], *arguments: object) -> None:
        try:
            listener(*arguments)
        except Exception as error:  # a listener's fault must not stop what it hears of
            self.faults.append(error)


def _overlap(some: tuple[int, ...] | None, others: tuple[int, ...] | None) -> bool:
    return some is None or others is None or not set(some).isdisjoint(others)
