"""The races whose fault is a late write: who is cut, who gets the pages, and when the write is let go.

Nothing is timed: the donor's write is held by a gate that opens when the victim is where the scene wants it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quiesce.lab.cluster import LabRequest
from quiesce.lab.lossy import Mischief
from quiesce.lab.race.journal import Note
from quiesce.lab.race.stage import COUNTED, SECRET, Layout, Run, Scene, Stage, parting
from quiesce.lab.worker import Faults
from quiesce.roles.ownership import runs_of, shown

ANSWER = 56  # tokens of the victim's answer
FIRST_HELD, HELD = (
    0.8,
    0.1,
)  # seconds for which the first safe run, which is drawn, and the others keep a victim waiting
DONOR_LINES = 40  # repeats of the secret: about 430 slots
SOON = 2.0  # seconds of a hold timeout that is to run out

LONGEST = 120.0  # seconds of a hold timeout that is not: a fence would end what the scene is about
ONE_PAIR = Layout(prefills=1, pool=96, context=96, page_size=1, hold_timeout=LONGEST)
TWO_DONORS = Layout(prefills=2, pool=512, context=512, hold_timeout=LONGEST)


FREE_AT_ONCE = Faults(release="at once")
LONG = "Repeat this for ever: " + f"{SECRET} " * DONOR_LINES


class OnePair(Scene):
    """One prefill, one decode, 96 tokens of pool: A is cut while its write is posted, and B needs its pages."""

    name = "one-pair"
    layout = ONE_PAIR
    donor = f"{SECRET} Say it."
    victim = "Count from 1 to 10."
    tokens = 24

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(), Faults() if safe else FREE_AT_ONCE

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        began = time.monotonic()
        cut = donor_cut(stage, stage.chat(self.donor), 8, began)
        lent = stage.pages_of("lent", began)
        victim = stage.ask_as_victim(stage.chat(self.victim), self.tokens)
        stage.until(lambda: _owned(stage, began, 2) or (safe and stage.waiting()), "B to have pages or wait")
        taken = stage.pages_of("owned", began) if _owned(stage, began, 2) else ()
        overlap = set(taken) & set(lent)
        _let_go(stage, safe)
        run = ended(self.name, stage, safe, began, baseline, (cut, victim))
        run.shown = bool(overlap)
        run.said = (
            f"A had pages {shown(runs_of(lent))}, B got {shown(runs_of(taken)) or 'none yet'} while A's write was "
            f"posted; in common: {shown(runs_of(overlap)) or 'none'}{_proof(run)}"
        )
        return run


class TwoDonors(Scene):
    """Two prefills, one decode: nothing puts A's write and B's in order, so A's lands in the middle of B's answer.

    On tcp every other safe run keeps the write back until the hold timeout: decode fences A's pages, B gets them, and
    the write comes in the middle of B's answer all the same, to be refused."""

    name = "two-donors"
    layout = TWO_DONORS
    tokens = ANSWER

    def sizes(self, safe: bool, transfer: str) -> Layout:
        return replace(self.layout, hold_timeout=SOON) if safe and transfer == "tcp" else self.layout

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(), Faults() if safe else FREE_AT_ONCE

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        began = time.monotonic()
        cut = donor_cut(stage, stage.chat(LONG), 16, began)
        fenced = safe and stage.transfer == "tcp" and stage.runs % 2 == 0
        return counting_victim(self, stage, baseline, safe, began, cut, patient=fenced)


class Tainted(Scene):
    """A's call fails, and its engine goes on writing. Who takes the error for the end frees pages under the write."""

    name = "tainted"
    layout = TWO_DONORS
    tokens = ANSWER

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(unknown=1.0, twin="" if safe else "errors drain"), Faults()

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        began = time.monotonic()
        stage.gate.touch()
        failed = stage.ask(stage.chat(LONG), stage.prefills[0], 16)
        stage.until_posted(failed, began, "its write")
        stage.until_returned(stage.pages_of("posted", began), began, "the failed request's pages")
        return counting_victim(self, stage, baseline, safe, began, failed)


class Reuse(Scene):
    """A room is used again while the ack of the transfer before is still under way. Who goes by the room believes
    that A's write has ended because that of somebody before it had."""

    name = "reuse"
    layout = TWO_DONORS
    tokens = ANSWER

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        late = Mischief("Drained", "delay", while_there=str(folder / "late-ack"))
        return Faults(mischief=(late,)), Faults(twin="" if safe else "acks by room")

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        began = time.monotonic()
        ack, room = stage.folder / "late-ack", secrets.randbits(63)
        ack.touch()
        donor_cut(stage, stage.chat(SECRET)[: stage.layout.page_size - 2], 1, began, room)  # one page: B gets A's too
        stage.gate.unlink()
        stage.until(lambda: stage.pages_of("landed", began), "the first write to land; its ack is under way")
        then = time.monotonic()
        cut = donor_cut(stage, stage.chat(LONG), 16, then, room)
        ack.unlink()
        stage.until(lambda: stage.pages_of("returned", then), "the late ack to arrive")
        return counting_victim(self, stage, baseline, safe, then, cut)


def counting_victim(
    scene: Scene,
    stage: Stage,
    baseline: Sequence[int],
    safe: bool,
    began: float,
    donor: LabRequest,
    *,
    patient: bool = False,
) -> Run:
    """The victim counts, or waits (`patient`: it counts, however long it has to wait before); the donor's write is
    let go in the middle of it, and the victim goes on when that is over."""
    stage.pause.touch()  # it does not go on after that point, however late somebody looks
    victim = stage.ask_as_victim(stage.chat(scene.victim), scene.tokens)

    def stuck() -> bool:
        return safe and not patient and stage.waiting()

    stage.until(lambda: len(victim.tokens) >= COUNTED or stuck(), "B to count, or to wait")
    late_before, then = stage.late_bytes(), time.monotonic()
    if victim.tokens:
        stage.gate.unlink()
        stage.until(lambda: stage.landed(then), "the donor's write to be over")
        stage.pause.unlink()
    else:
        stage.pause.unlink()
        _let_go(stage, safe)
    run = ended(scene.name, stage, safe, began, baseline, (donor, victim))
    run.shown, run.late_bytes = not run.right, stage.late_bytes() - late_before
    run.said += _proof(run)
    return run


def _proof(run: Run) -> str:
    """For the report."""
    if not run.safe:
        return ""
    late = f"; {run.late_bytes} late bytes were refused" if run.late_bytes else ""
    return (f"; A's pages came back by `{run.closed_by}`" if run.closed_by else "") + late


def donor_cut(stage: Stage, prompt: Sequence[int], tokens: int, began: float, room: int | None = None) -> LabRequest:
    """A request whose prompt has been computed and whose write is posted and held; then its decode leg is cut."""
    stage.gate.touch()
    donor = stage.ask(prompt, stage.prefills[0], tokens, room)
    stage.until_posted(donor, began, "the donor's write")
    stage.cut_decode_leg(donor)
    stage.until(lambda: stage.pages_of("ended", began), "decode to hear of the cut")
    return donor


def _let_go(stage: Stage, safe: bool) -> None:
    if safe:
        stage.cluster.until_time(HELD if stage.runs else FIRST_HELD)
    stage.gate.unlink()


def _owned(stage: Stage, since: float, count: int) -> bool:
    return sum(note.event == "owned" for note in stage.notes(since)) >= count


def ended(
    scene: str,
    stage: Stage,
    safe: bool,
    began: float,
    baseline: Sequence[int],
    requests: tuple[LabRequest, LabRequest],
) -> Run:
    donor, victim = requests
    stage.until(lambda: victim.over and donor.over, "both to end")
    stage.settle()
    notes = stage.notes(began)
    at = parting(baseline, victim.tokens)
    run = Run(scene, safe, False, at is None, _parted(stage, baseline, victim.tokens, at), notes, began)
    run.ended = time.monotonic()
    run.labels = labels_of(notes)
    mine = [note.detail for note in notes if note.event == "closed" and run.labels.get(note.tid) == "A"]
    run.closed_by = mine[-1] if mine else ""
    stage.runs += 1
    run.baseline, run.answer, run.parts_at = stage.words(baseline), stage.words(victim.tokens), at
    return run


def labels_of(notes: Sequence[Note]) -> dict[str, str]:
    """The transfers in the order in which they got pages: A, B, C."""
    order = list(dict.fromkeys(note.tid for note in notes if note.event == "owned"))
    return {tid: "ABCDEFGH"[number] for number, tid in enumerate(order[:8])}


def _parted(stage: Stage, baseline: Sequence[int], found: Sequence[int], at: int | None) -> str:
    if at is None:
        return "the answer is the baseline's, token by token"
    return (
        f"right up to token {at}: ...{stage.words(found[max(0, at - 12) : at])!r}, then "
        f"{stage.words(found[at : at + 24])!r} where the baseline has {stage.words(baseline[at : at + 12])!r}"
    )
