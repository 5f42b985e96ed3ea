"""From notes to what each page of decode's pool went through: stretches of one state, writes, and late landings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from quiesce.lab.race.journal import Note


@dataclass(frozen=True)
class Stretch:
    """One page, or a band of neighbours that fared alike, in one state. `state`: owned, lent, held or retained."""

    start: float
    end: float
    tid: str
    state: str


@dataclass
class Write:
    """One posted write into `pages`. `late`: those that had become another's when it landed."""

    tid: str
    pages: tuple[int, ...]
    posted: float
    landed: float | None = None
    refused: bool = False
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class Band:
    """Pages `first`..`last`, which went through the same."""

    first: int
    last: int
    stretches: tuple[Stretch, ...]


@dataclass
class History:
    began: float
    ended: float
    bands: list[Band]
    writes: list[Write]
    moments: list[tuple[float, str, str]] = field(default_factory=list)  # when, whose, what


class _Page:
    """The state of one page while the notes are read."""

    def __init__(self) -> None:
        self.tid = ""
        self.state = ""
        self.since = 0.0
        self.done: list[Stretch] = []

    def becomes(self, tid: str, state: str, at: float) -> None:
        if self.tid and at > self.since and (tid, state) != (self.tid, self.state):
            self.done.append(Stretch(self.since, at, self.tid, self.state))
        if (tid, state) != (self.tid, self.state):
            self.tid, self.state, self.since = tid, state, at


STATES = {"owned": "owned", "grown": "owned", "lent": "lent", "ended": "held", "retained": "retained", "returned": ""}


def history(notes: Sequence[Note], began: float, ended: float) -> History:
    pages: dict[int, _Page] = {}
    writes: list[Write] = []
    moments: list[tuple[float, str, str]] = []
    for note in notes:
        touched = [pages.setdefault(number, _Page()) for number in note.pages]
        if note.event in STATES:
            for page in touched:
                state = STATES[note.event]
                page.becomes(note.tid if state else "", state, note.at)
        elif note.event == "closed":
            for page in touched:
                if page.state == "lent":
                    page.becomes(note.tid, "owned", note.at)
        elif note.event == "posted":
            writes.append(Write(touched[0].tid if touched else "", note.pages, note.at))
        elif note.event in ("landed", "refused"):
            _land(writes, pages, note)
        if note.event in ("asked", "owned", "ended", "returned") or (note.event == "closed" and note.detail):
            moments.append((note.at, note.tid, f"{note.event} {note.detail}".strip()))
    for page in pages.values():
        page.becomes("", "", ended)
    return History(began, ended, _bands(pages), writes, moments)


def _land(writes: list[Write], pages: dict[int, _Page], note: Note) -> None:
    write = next((w for w in writes if w.landed is None and w.pages == note.pages), None)
    if write is None:
        return
    write.landed = note.at
    write.refused = note.event == "refused"
    if not write.refused:
        write.late = tuple(n for n in write.pages if pages[n].tid not in ("", write.tid))


def _bands(pages: dict[int, _Page]) -> list[Band]:
    """Neighbours with the same stretches are one band, so that the picture has few shapes."""
    bands: list[Band] = []
    for stretches, group in groupby(sorted(pages), key=lambda number: tuple(pages[number].done)):
        numbers = list(group)
        run = [numbers[0]]
        for number in [*numbers[1:], None]:
            if number is not None and number == run[-1] + 1:
                run.append(number)
                continue
            bands.append(Band(run[0], run[-1], stretches))
            run = [] if number is None else [number]
    return [band for band in bands if band.stretches]
