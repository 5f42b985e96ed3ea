"""What the picture of a race is drawn from."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from quiesce.lab.race.history import Stretch, history
from quiesce.lab.race.journal import Note, Reader
from quiesce.lab.race.picture import svg
from quiesce.lab.race.stage import Run, parting

A, B = "a.1", "b.2"


def notes(*, freed_at: float, taken_at: float) -> list[Note]:
    """A has pages 0-3, is cut at 2 and its write lands at 5; B takes pages 0-1."""
    lines = [
        Note(1.0, "owned", A, (0, 1, 2, 3)),
        Note(1.1, "lent", A, (0, 1, 2, 3)),
        Note(1.5, "posted", "", (0, 1, 2, 3)),
        Note(2.0, "ended", A, (0, 1, 2, 3)),
        Note(freed_at, "returned", A, (0, 1, 2, 3)),
        Note(taken_at, "owned", B, (0, 1)),
        Note(5.0, "landed", "", (0, 1, 2, 3), "placed"),
        Note(8.0, "returned", B, (0, 1)),
    ]
    return sorted(lines, key=lambda note: note.at)


def test_a_write_that_lands_in_anothers_pages_is_late_there_and_only_there() -> None:
    told = history(notes(freed_at=2.0, taken_at=3.0), 0.0, 9.0)

    (write,) = told.writes
    assert (write.tid, write.posted, write.landed, write.late) == (A, 1.5, 5.0, (0, 1))
    upper = next(band for band in told.bands if band.first == 0)
    assert (upper.first, upper.last) == (0, 1)
    assert upper.stretches[-1] == Stretch(3.0, 8.0, B, "owned")


def test_a_write_that_lands_while_its_pages_are_held_is_not_late() -> None:
    told = history(notes(freed_at=5.5, taken_at=6.0), 0.0, 9.0)

    assert told.writes[0].late == ()
    states = [(s.state, s.tid) for s in next(b for b in told.bands if b.first == 0).stretches]
    assert states == [("owned", A), ("lent", A), ("held", A), ("owned", B)]


def test_the_picture_is_well_formed_and_marks_the_late_landing_alone() -> None:
    def drawn(*, freed_at: float, taken_at: float, safe: bool) -> str:
        lines = notes(freed_at=freed_at, taken_at=taken_at)
        return svg([Run("two-donors", safe, not safe, safe, "<said>", lines, 0.0, 9.0, {A: "A", B: "B"})])

    unsafe = drawn(freed_at=2.0, taken_at=3.0, safe=False)
    safe = drawn(freed_at=5.5, taken_at=6.0, safe=True)
    for picture in (unsafe, safe):
        ET.fromstring(picture)
    legend = 1
    assert unsafe.count('class="late"') == 1 + legend
    assert safe.count('class="late"') == legend


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"at": 1, "event": "owned", "tid": "a", "pages": [1]}\n{"at": 2, "eve')
    assert [note.event for note in Reader(path, tmp_path / "absent").since(0.0)] == ["owned"]


def test_answers_part_at_the_first_other_token_or_where_one_ends() -> None:
    assert parting([1, 2, 3], [1, 2, 3]) is None
    assert parting([1, 2, 3], [1, 9, 3]) == 1
    assert parting([1, 2, 3], [1, 2]) == 2
