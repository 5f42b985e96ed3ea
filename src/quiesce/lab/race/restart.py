"""The restart: decode dies while A's write to it is queued, and comes back at the same address with another pool.

Unsafe, on tcp: the new process listens where the old one did, under the same secret, places whatever comes, and
prefill keeps what is queued for the address. A's write lands in pages that are B's, in a process that has never heard
of A. Safe: every process has an address and a secret of its own, so what was for the old one reaches nobody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from quiesce.lab.race.scenes import ANSWER, LONG, TWO_DONORS, counting_victim
from quiesce.lab.race.stage import Run, Scene, Stage
from quiesce.lab.worker import Faults

NOBODY = "nobody maps the pool of a new process: what was to be written into the old one has nowhere to go"
LIBRARY = "the engine's library draws the address of each agent anew, and takes none over"


class Restart(Scene):
    name = "restart"
    layout = TWO_DONORS
    tokens = ANSWER
    cannot = {"shm": NOBODY, "nixl": LIBRARY, "mooncake": LIBRARY}  # noqa: RUF012

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        if safe:
            return Faults(), Faults()
        return Faults(keeps_addresses=True), Faults(place=str(folder / "place"))

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        stage.prepare_restart()
        began = time.monotonic()
        stage.gate.touch()
        donor = stage.ask(stage.chat(LONG), stage.prefills[0], 16)
        stage.until_posted(donor, began, "the donor's write")
        stage.restart_decode(donor)
        run = counting_victim(self, stage, baseline, safe, began, donor)
        late = [note for note in run.notes if note.event == "landed"]
        run.headline = (
            "Decode dies and comes back at its address: A's write lands in B's pages"
            if run.shown
            else "Decode dies and comes back: A's write reaches nobody"
        )
        if safe:
            run.said += "; A's write landed nowhere" if len(late) < 2 else "; A's write LANDED"
        return run
