"""Who held page 17 at 10:42: the latest changes of a worker's ledger, kept for whoever asks afterwards.

What is lent to our own engine's steps is left out: it tells nothing that a request's owning does not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quiesce.core.ledger import Change, Lease
from quiesce.core.messages import TransferId
from quiesce.core.proofs import Borrowing, Proof, Waiver

ENTRIES = 65_536
RUNS_PER_ENTRY = 8  # on average: what a much divided pool may make the log grow to
MOST_ANSWERED = 1000  # entries in one answer, the newest
MOST_SHOWN = 20  # runs of pages in one entry of an answer

Runs = tuple[tuple[int, int], ...]  # pages first..last, both included, in order


@dataclass(frozen=True, slots=True)
class Entry:
    at: float  # seconds since 1970
    event: str
    tid: TransferId
    runs: Runs
    detail: tuple[tuple[str, Any], ...] = ()


def runs_of(pages: Iterable[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page - 1:
            runs[-1] = (runs[-1][0], page)
        else:
            runs.append((page, page))
    return tuple(runs)


class OwnershipLog:
    """Set `observe` as the ledger's observer. `rid_of` names the request of a transfer while it runs. `pages`: in the
    pool."""

    def __init__(
        self,
        rid_of: Callable[[TransferId], str | None],
        *,
        pages: int,
        entries: int = ENTRIES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rid_of = rid_of
        self._clock = clock
        self._pages = pages
        self._most_entries = entries
        self._most_runs = entries * RUNS_PER_ENTRY
        self._entries: deque[Entry] = deque()
        self._runs = 0
        self._whole: dict[TransferId, Runs] = {}  # of open holdings, so that their entries share one
        self._rids: dict[TransferId, str] = {}
        self._returned: deque[TransferId] = deque()  # whose names may be forgotten, the oldest first
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------ what the ledger tells

    def observe(self, change: Change) -> None:
        tid = change.tid
        self.name(tid)
        if change.of_a_step:
            return
        runs = runs_of(change.pages)
        if self._whole.get(tid) == runs:
            runs = self._whole[tid]
        elif change.event != "grown":
            self._whole[tid] = runs
        if change.event == "returned":
            del self._whole[tid]
            self._forget_names(tid)
        self._keep(Entry(self._clock(), change.event, tid, runs, _detail(change.lease, change.closed_by)))

    def name(self, tid: TransferId) -> None:
        """Asked whenever something is lent: a request gets its transfer a moment after the pages are taken."""
        if tid not in self._rids and (rid := self._rid_of(tid)) is not None:
            self._rids[tid] = rid

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._runs += len(entry.runs)
        while len(self._entries) > self._most_entries or (self._runs > self._most_runs and len(self._entries) > 1):
            self._runs -= len(self._entries.popleft().runs)
            self.forgotten += 1

    def _forget_names(self, tid: TransferId) -> None:
        self._returned.append(tid)
        if len(self._returned) > self._most_entries:
            self._rids.pop(self._returned.popleft(), None)

    # ------------------------------------------------------------ who asks

    def about(self, page: int) -> dict[str, Any]:
        """JSON-able: what happened to one page, the oldest first."""
        if not 0 <= page < self._pages:
            return {"page": page, "error": f"there is no such page here, only 0 to {self._pages - 1}"}
        found: deque[Entry] = deque(maxlen=MOST_ANSWERED)
        found.extend(entry for entry in self._entries if any(first <= page <= last for first, last in entry.runs))
        return {
            "page": page,
            "remembered_since": _when(self._entries[0].at) if self._entries else None,
            "entries_forgotten": self.forgotten,
            "entries": [self._shown(entry) for entry in found],
        }

    def _shown(self, entry: Entry) -> dict[str, Any]:
        return {
            "at": _when(entry.at),
            "event": entry.event,
            "transfer": str(entry.tid),
            "rid": self._rids.get(entry.tid),
            "pages": shown(entry.runs),
            **dict(entry.detail),
        }


def shown(runs: Runs) -> str:
    """`3-7,17`; a long list is cut and says so."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:MOST_SHOWN]]
    if len(runs) > MOST_SHOWN:
        parts.append(f"... {len(runs) - MOST_SHOWN} runs more")
    return ",".join(parts)


def _detail(lease: Lease | None, closed_by: Proof | Waiver | None) -> tuple[tuple[str, Any], ...]:
    if lease is None:
        return ()
    key = lease.key
    detail: list[tuple[str, Any]] = [("lease", key.kind.value)]
    if key.kind is not Borrowing.FOREIGN:
        detail += [("rank", key.rank), ("peer_epoch", f"{key.epoch:016x}"), ("generation", lease.generation)]
    if isinstance(closed_by, Waiver):
        detail.append(("proof", f"none: {closed_by.reason}"))
    elif closed_by is not None:
        detail.append(("proof", closed_by.kind.value))
    return tuple(detail)


def _when(seconds: float) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
