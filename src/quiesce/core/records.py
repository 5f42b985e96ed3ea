"""What the borrower remembers, and when it may forget (protocol, sections 2 and 4; guards A4, N5, N9).

A record goes when its lender's closed set covers it, or with that lender's process, and only at count zero: never
by age, never for lack of room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from quiesce.core.borrowing import LenderGone, Record, State
from quiesce.core.closed_set import ClosedSets
from quiesce.core.ledger import Ledger
from quiesce.core.machine import Action, Stopped
from quiesce.core.messages import Leg, Ping, TransferId
from quiesce.core.posting import Posting
from quiesce.core.proofs import LeaseKey, Proof, ProofKind

K = TypeVar("K")
L = TypeVar("L")

LENDER_CLOSED = "the lender closed the transfer"
LENDER_GONE = "the decode engine is gone"


class Records(ClosedSets, Posting[Record]):
    """`sources` is this engine's own ledger: pages under a pending post are lent to it (guard H14). `batch`: pages of
    one post (guard L8)."""

    def __init__(
        self,
        epoch: int,
        sources: Ledger,
        *,
        rank: int = 0,
        window: int = 4,
        batch: int = 256,
        max_records: int = 4096,
    ) -> None:
        ClosedSets.__init__(self)
        Posting.__init__(self)
        self.epoch = epoch
        self.rank = rank
        self.sources = sources
        self.window = window
        self.batch = batch
        self.max_records = max_records
        self.records: dict[TransferId, dict[int, Record]] = {}  # by transfer, then by lender rank
        self._by_lender: dict[tuple[int, int], dict[TransferId, Record]] = {}  # (epoch, rank): the same once more
        self.known = 0
        self.ahead = 0  # open records: the place of the next one
        self.stale = 0
        self.ended: Counter[str] = Counter()

    def record(self, leg: Leg) -> Record | None:
        return self.records.get(leg.tid, {}).get(leg.d_rank)

    def all_records(self) -> Iterator[Record]:
        for legs in self.records.values():
            yield from legs.values()

    def _store(self, record: Record) -> None:
        self.records.setdefault(record.leg.tid, {})[record.leg.d_rank] = record
        self._by_lender.setdefault((record.leg.tid.epoch, record.leg.d_rank), {})[record.leg.tid] = record
        self.known += 1
        self.ahead += record.state is State.OPEN

    def _remove(self, record: Record) -> None:
        tid, rank = record.leg.tid, record.leg.d_rank
        _delete(self.records, tid, rank)
        _delete(self._by_lender, (tid.epoch, rank), tid)
        self.known -= 1

    def _leave_open(self, record: Record, state: State) -> None:
        self.ahead -= record.state is State.OPEN
        record.state = state

    def _drop(self) -> list[Action]:
        self.stale += 1
        return []

    # ------------------------------------------------------------ forgetting

    def _closed_set(self, ping: Ping) -> list[Action]:
        """Only so may a record go, and only at count zero (guard N9)."""
        if not self._take(ping):
            return self._drop()
        key = (ping.epoch, ping.rank)
        mine = [record for record in self._by_lender.get(key, {}).values() if self._is_closed(record.leg)]
        return self._close_unanswered(mine, LENDER_CLOSED)

    def _lender_gone(self, event: LenderGone) -> list[Action]:
        self._is_gone(event.epoch)
        legs = [records for key, records in self._by_lender.items() if key[0] == event.epoch]
        mine = [record for records in legs for record in records.values()]
        return self._close_unanswered(mine, LENDER_GONE)

    def _close_unanswered(self, records: list[Record], reason: str) -> list[Action]:
        actions: list[Action] = []
        for record in records:
            if record.state is State.OPEN:
                actions.append(Stopped(record.leg, reason))
            self._stop(record)
            record.covered = True
            record.answer = None
            if record.state in (State.OPEN, State.FAILED, State.DONE):
                self._leave_open(record, State.CLOSING)
            self._settle(record)
            if record.count == 0:
                self._forget(record)
        return actions

    def _forget(self, record: Record) -> None:
        """The lender has permitted it and nothing is counted: the record, its taint and its sources go."""
        assert record.count == 0 and record.covered
        record.tainted = False
        self._settle(record)
        self._remove(record)

    def _settle(self, record: Record, kind: ProofKind = ProofKind.DRAINED) -> None:
        """Closes the source lease at count zero, and ends the owning once no leg of the transfer is open."""
        tid = record.leg.tid
        if record.lent and record.count == 0 and not record.tainted and record.state is not State.OPEN:
            key = LeaseKey.source(record.leg)
            self.sources.close(key, Proof.spoken(kind, key))
            record.lent = False
        if not any(leg.state is State.OPEN for leg in self.records[tid].values()):
            self.sources.end(tid)


def _delete(table: dict[K, dict[L, Record]], key: K, part: L) -> None:
    parts = table[key]
    del parts[part]
    if not parts:
        del table[key]
