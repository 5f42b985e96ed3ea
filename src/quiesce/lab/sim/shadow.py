"""The oracle's own books beside a worker's ledger: every change is checked as it happens, in constant time a page.

It keeps nothing that the ledger tells it to believe: who has a page, which leases are open and what is free follow
from the changes alone, and are compared with what the ledger says of itself.
"""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core.ledger import Change, Lease, Ledger, Observer
from quiesce.core.messages import Leg, TransferId
from quiesce.core.proofs import Borrowing, LeaseKey, Proof, Waiver
from quiesce.lab.invariants import LEDGER
from quiesce.lab.sim.engine import Memory


class Shadow:
    """`may_land(leg)`: bytes of that leg may still reach these pages. `broken(rule, tid)` hears what is broken.

    `strict`: a lease that closes while bytes may still land is reported at once, and not only when they do."""

    def __init__(
        self,
        ledger: Ledger,
        memory: Memory,
        may_land: Callable[[Leg], bool],
        broken: Callable[[str, TransferId | None], None],
        strict: bool,
        epoch: int,
    ) -> None:
        assert ledger.observe is not None
        self.ledger = ledger
        self.memory = memory
        self.may_land = may_land
        self.broken = broken
        self.strict = strict
        self.epoch = epoch
        self.next: Observer = ledger.observe
        self.owners: dict[int, TransferId] = {}
        self.leases: dict[LeaseKey, Lease] = {}
        self.sizes: dict[TransferId, int] = {}
        self.ended: set[TransferId] = set()
        self.rows_of_running = 0
        self.pulled_from = False  # its pages are lent to readers
        self.changed = False  # since the last look
        self.observed: Observer | None = None  # for the story
        ledger.observe = self.observe

    def observe(self, change: Change) -> None:
        event, tid, pages, lease, closed_by = change
        self.changed = True
        self.next(change)
        if self.observed is not None:
            self.observed(change)
        if event == "lent":
            assert lease is not None
            if lease.key in self.leases:
                self.broken("a lease is open once", tid)
            self.leases[lease.key] = lease
        elif event == "closed":
            assert lease is not None
            self._closed(tid, lease, closed_by)
        elif event in ("owned", "grown"):
            for page in pages:
                if page in self.owners:
                    self.broken("no page belongs to two transfers", tid)
                self.owners[page] = tid
            self.memory.clear(list(pages))
            self.sizes[tid] = self.sizes.get(tid, 0) + len(list(pages))
        elif event == "ended":
            self.ended.add(tid)
        elif event == "returned":
            self._returned(tid, list(pages))

    def _closed(self, tid: TransferId, lease: Lease, closed_by: Proof | Waiver | None) -> None:
        if self.leases.pop(lease.key, None) is None:
            self.broken("a lease closes by exactly one proof", tid)
        if not isinstance(closed_by, Proof):
            self.broken("a lease closes by a proof, never by a timer or a wish", tid)
        key = lease.key
        if self.strict and key.kind is (Borrowing.READ if self.pulled_from else Borrowing.WRITE):
            leg = Leg(tid, key.rank, 0, self.epoch) if self.pulled_from else Leg(tid, 0, key.rank, key.epoch)
            if self.may_land(leg):
                self.broken("every byte that may still land is covered by an open lease of its own writer", tid)

    def _returned(self, tid: TransferId, pages: list[int]) -> None:
        if tid not in self.ended:
            self.broken("pages return only when their owner has ended", tid)
        self.ended.discard(tid)
        if self.sizes.pop(tid, None) != len(pages):
            self.broken("pages and row of a transfer return together, all of them", tid)
        if self.strict and any(key.tid == tid for key in self.leases):
            self.broken("no page is free with an open lease", tid)
        for page in pages:
            if self.owners.pop(page, None) != tid:
                self.broken("pages return from whoever has them", tid)
        self.memory.clear(pages)

    def lends(self, leg: Leg) -> bool:
        return LeaseKey.write(leg) in self.leases

    # ------------------------------------------------------------ after every event

    def check(self) -> None:
        """What must hold after every event, from counters alone."""
        self.changed = False
        ledger = self.ledger
        census = ledger.census()
        if census.free + census.owned + census.cached + census.held + census.retained != census.total:
            self.broken("free + owned + cached + held + retained = pool", None)
        if census.free + len(self.owners) != census.total:
            self.broken("no page is free while it belongs to a transfer", None)
        if ledger.opened != sum(ledger.closed_by.values()) + ledger.steps + len(self.leases):
            self.broken("every lease ever opened is open or was closed by exactly one proof", None)
        if census.rows_free + len(self.sizes) != census.rows_total:
            self.broken("no row is free, and none is shared, while it belongs to a transfer", None)
        running = len(self.sizes) - len(self.ended)
        if not census.rows_free and running < self.rows_of_running and len(self.ended) < self.rows_of_running:
            self.broken("holds take no row of running requests", None)
        if ledger.unsound:
            self.broken("a lease closes by a proof, never by an operator's wish or a timer", None)

    def check_all(self) -> None:
        """The checker's own rules, which look at every page."""
        if bool(self.ledger.not_idle()) != bool(self.sizes):
            self.broken("whoever asks whether the ledger is idle is told what is held", None)
        for rule, holds in LEDGER.items():
            if not holds(self.ledger):
                self.broken(rule, None)
