"""The late read, in pull: A's pages at prefill are lent to decode, and the lease runs out before decode has read.

Unsafe: prefill frees them by the clock, C's prompt is computed into them, and decode takes what it reads for A's.
This was measured in vLLM 0.32: status 200, and another tenant's prompt in the answer. Safe: the lease ends by a
fence, what is read too late is refused or found out, and A's client hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quiesce.lab.lossy import Mischief
from quiesce.lab.race.scenes import LONG, ended
from quiesce.lab.race.stage import Layout, Run, Scene, Stage
from quiesce.lab.worker import Faults

HOLD = 3.0  # seconds: the lease's, without a word from decode


class LateRead(Scene):
    name = "late-read"
    layout = Layout(prefills=1, pool=1024, context=512, prefill_pool=512, hold_timeout=HOLD)
    tokens = 60

    def settings(self, safe: bool) -> dict[str, Any]:
        return {"direction": "pull"}

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        silent = Mischief("Ping", "delay", while_there=str(folder / "silent"))
        return Faults(twin="" if safe else "by clock"), Faults(
            mischief=(silent,), twin="" if safe else "unchecked reads"
        )

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        began = time.monotonic()
        silent = stage.folder / "silent"
        silent.touch()
        stage.gate.touch()
        reader = stage.ask(stage.chat(self.victim), stage.prefills[0], self.tokens)
        stage.until_posted(reader, began, "decode's read")
        stage.until_returned(stage.pages_of("posted", began), began, "A's source pages, their lease having run out,")
        then = time.monotonic()
        other = stage.ask(stage.chat(LONG), stage.prefills[0], 8)
        stage.until(lambda: stage.pages_of("lent", then) or other.over, "C's prompt to be computed")
        stage.gate.unlink()
        silent.unlink()
        run = ended(self.name, stage, safe, began, baseline, (other, reader))
        run.labels = {tid: {"A": "A", "B": "C"}.get(label, label) for tid, label in run.labels.items()}
        wrong = reader.tokens != list(baseline[: len(reader.tokens)])
        run.shown = wrong
        run.right = not wrong and (reader.outcome == "length" or bool(reader.errors) or reader.outcome == "failed")
        said = reader.ends[reader.answerer][0]
        if reader.outcome != "length":
            run.parts_at = None
            run.answer = f"{said.status}: {said.reason}"
            run.said = f"A was told: {run.answer}"
        run.headline = (
            "A's lease ends by proof, and a read that comes too late is told from a good one"
            if safe
            else "A's lease ends by the clock: decode reads C's prompt where A's had been"
        )
        return run
