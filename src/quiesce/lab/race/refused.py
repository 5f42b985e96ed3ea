"""The incident of 2026: a context longer than prefill's pool, and a refused prompt that went through the hand-off.

Unsafe: the prompt is refused, and decode is told all the same that its pages are filled. It reads what the request
before had left there. Safe: such a pool is not started, and with the limit lowered both legs are refused at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from quiesce.engine.config import read_config
from quiesce.lab.race.scenes import ended
from quiesce.lab.race.stage import DECODE, PATIENCE, SECRET, VICTIM, Layout, Run, Scene, Stage
from quiesce.lab.worker import Faults
from quiesce.ops.doctor_model import pool
from quiesce.options import SizeOptions

LOWERED = 256  # tokens: the limit that safe mode is told, as with --context-length
FIRST_TOKEN = 198  # a line break in SmolLM2's vocabulary: what the stub says the answer begins with
EARLIER = "Repeat this for ever: " + f"{SECRET} " * 18  # about 210 tokens: it fits prefill's pool
TOO_LONG = VICTIM + " Begin with one and go on." * 50  # about 400: it does not


class Refused(Scene):
    name = "refused"
    layout = Layout(prefills=1, pool=1024, context=1024, prefill_pool=256)
    tokens = 40

    def sizes(self, safe: bool, transfer: str) -> Layout:
        return Layout(prefills=1, pool=1024, context=LOWERED, prefill_pool=256) if safe else self.layout

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(twin="" if safe else "stub", first_token=FIRST_TOKEN), Faults(twin="" if safe else "no limit")

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        return self._safe(stage, baseline) if safe else self._unsafe(stage, baseline)

    def _unsafe(self, stage: Stage, baseline: Sequence[int]) -> Run:
        began = time.monotonic()
        earlier = stage.ask(stage.chat(EARLIER), stage.prefills[0], 8)
        stage.until(lambda: earlier.over, "the request before it")
        victim = stage.ask(stage.chat(TOO_LONG), stage.prefills[0], self.tokens)
        run = ended(self.name, stage, False, began, baseline, (earlier, victim))
        run.shown = victim.outcome == "length"  # a refused prompt, answered with status 200
        run.said = (
            f"{len(victim.prompt)} tokens were refused by a pool of {stage.layout.prefill_pool} and answered all the "
            f"same, from pages that nobody filled: {run.answer[:80]!r}"
        )
        run.headline = "B was refused, and is answered all the same, from pages that nobody filled for it"
        return run

    def _safe(self, stage: Stage, baseline: Sequence[int]) -> Run:
        began = time.monotonic()
        why, found = _start_up(stage), _doctor(stage.cluster.model)
        earlier = stage.ask(stage.chat(EARLIER), stage.prefills[0], 8)
        stage.until(lambda: earlier.over, "the request before it")
        asked = time.monotonic()
        refused = stage.ask(stage.chat(TOO_LONG), stage.prefills[0], self.tokens)
        stage.until(lambda: refused.over, "both legs to answer")
        took = time.monotonic() - asked
        statuses = [refused.ends[name][0].status for name in refused.workers]
        run = ended(self.name, stage, True, began, refused.tokens, (earlier, refused))
        run.right = statuses == [400, 400] and not refused.tokens and why is not None and found is not None
        run.shown = bool(refused.tokens)
        run.said = (
            f"start-up: {why or 'not refused'}; doctor: {found or 'nothing'}; "
            f"with a limit of {LOWERED}: {statuses} in {1000 * took:.1f} ms"
        )
        run.answer = run.baseline = f"400: {refused.ends[DECODE][0].reason}"
        run.headline = "Such a pool is not started; with the limit lowered B is refused and never has a page"
        return run


def _doctor(model: Path) -> str | None:
    """What `quiesce doctor` finds wrong about the same sizes; None: nothing."""
    sizes = SizeOptions(context_length=1024, max_total_tokens=256)
    finding = pool(read_config(model), sizes)
    return f"{finding.found}. {finding.fix}" if finding.status == "fail" else None


def _start_up(stage: Stage) -> str | None:
    """Why a prefill worker with a pool that is smaller than its context does not start; None: it did."""
    before = stage.log.stat().st_size
    process = stage.cluster.launch("prefill", "prefill-short", context_length=1024, max_total_tokens=256)
    if process.wait(PATIENCE) == 0:
        return None
    text = stage.log.read_bytes()[before:].decode(errors="replace")
    return next((line.split("Error: ")[-1] for line in text.splitlines() if "pool holds 256 tokens" in line), None)
