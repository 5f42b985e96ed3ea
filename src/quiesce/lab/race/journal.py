"""What happened to each page and when: lines of JSON that the lab's workers append and the picture is drawn from.

All processes of one machine share the monotonic clock, so the lines of several files fit on one time line.
"""

from __future__ import annotations

import dataclasses
import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quiesce.core.ledger import Change, Ledger
from quiesce.core.messages import Grant, TransferId
from quiesce.core.posting import Outcome
from quiesce.core.proofs import Proof
from quiesce.lab.faulty import Decide, FaultyTransport, Make, _Write
from quiesce.transfer.interface import Peer, Post, Transport

GATE_POLL = 0.002  # seconds between two looks at a closed gate


class Journal:
    """Appends to one file; each line is written at once, so that a killed process leaves all it said."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def note(self, event: str, tid: TransferId | str | None, pages: Iterable[int], **more: Any) -> None:
        line = {"at": time.monotonic(), "event": event, "tid": str(tid or ""), "pages": list(pages), **more}
        self._file.write(msgspec.json.encode(line) + b"\n")


@dataclass(frozen=True)
class Note:
    """One line: `event` is owned, grown, lent, closed, ended, retained, returned (the lender's ledger) or posted,
    released, landed, refused (the other side's posts, which know no transfer), or asked (the victim has arrived);
    `pages` are the lender's."""

    at: float
    event: str
    tid: str
    pages: tuple[int, ...]
    detail: str = ""


class Reader:
    """All notes of some files, in order of time. Each line is read once, however often it is asked; one that is not
    whole yet is left for the next time."""

    def __init__(self, *paths: Path) -> None:
        self._at = dict.fromkeys(paths, 0)
        self._notes: list[Note] = []

    def since(self, began: float) -> list[Note]:
        """From that moment on, in seconds of the monotonic clock."""
        fresh = [note for path in self._at for note in self._more(path)]
        if fresh:
            self._notes = sorted(self._notes + fresh, key=lambda note: note.at)
        return self._notes[bisect_left(self._notes, began, key=lambda note: note.at) :]

    def _more(self, path: Path) -> list[Note]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._at[path])
            data = file.read()
        whole, _, _ = data.rpartition(b"\n")
        self._at[path] += len(whole) + bool(whole)
        return [note for line in whole.splitlines() if (note := _note(line)) is not None]


def _note(line: bytes) -> Note | None:
    """None: cut short by a kill."""
    try:
        plain = json.loads(line)
    except ValueError:
        return None
    return Note(plain["at"], plain["event"], plain["tid"], tuple(plain["pages"]), plain.get("detail", ""))


def follow(ledger: Ledger, journal: Journal) -> None:
    """Every change of the ledger goes into the journal too; the leases of our own steps are left out."""
    inner = ledger.observe

    def observe(change: Change) -> None:
        if inner is not None:
            inner(change)
        if change.of_a_step:
            return
        proof = change.closed_by
        detail = "" if proof is None else proof.kind.value if isinstance(proof, Proof) else "waiver"
        journal.note(change.event, change.tid, tuple(change.pages), detail=detail)

    ledger.observe = observe


class GatedTransport(FaultyTransport):
    """Holds every post back while the file `gate` exists; writes down when each was posted, let go and landed."""

    def __init__(
        self, inner: Transport, decide: Decide, gate: Path | None, journal: Journal | None, *, proves: bool = True
    ) -> None:
        self._gate = gate
        self._journal = journal
        self._lines: dict[int, tuple[int, ...]] = {}
        super().__init__(inner, lambda pages: dataclasses.replace(decide(pages), hold=self._shut()), proves=proves)

    def _shut(self) -> bool:
        return self._gate is not None and self._gate.exists()

    def _note(self, event: str, post: Post, detail: str = "") -> None:
        if self._journal is not None and post.id in self._lines:
            self._journal.note(event, None, self._lines[post.id], detail=detail)

    def _begin(
        self, make: Make, peer: Peer, first: Sequence[int], second: Sequence[int], grant: Grant, reads: bool
    ) -> Post:
        """`second` are the lender's pages, of a write and of a read."""
        self._lines[self._last + 1] = tuple(second)
        if self._journal is not None:
            self._journal.note("posted", None, second)
        return super()._begin(make, peer, first, second, grant, reads)

    def _advance(self) -> None:
        if self._writes and not self._closed and not self._shut():
            for write in self._writes.values():
                if write.held:
                    self._note("released", write.post)
                    write.held = False
                    self._schedule(write)
        super()._advance()

    def _settle(self) -> None:
        super()._settle()
        if any(write.held for write in self._writes.values()):
            self._watch.alarm(time.monotonic() + GATE_POLL)

    def _conclude(self, write: _Write) -> None:
        """When it is over, whatever was told of it before."""
        before = write.post.id in self._writes
        super()._conclude(write)
        if before and write.post.id not in self._writes:
            self._note("landed" if write.worst is Outcome.PLACED else "refused", write.post, write.worst.value)
            self._lines.pop(write.post.id, None)
