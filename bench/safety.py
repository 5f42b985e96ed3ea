"""`make bench-safety`: what holding costs. One cluster, one run, the rule on and off in turns.

    python -m bench.safety [--rounds 16] [--releases 50]

Three arms, in a new order each round: A and A' with the ledger, B with pages freed at once (decode looks at a file,
so that processes, memory and caches are the same). Nobody is cut: this is the happy path. Then the abort path: how
long after the last byte of a cut request has landed its pages are free, on an idle engine and on one that decodes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any

from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.lab.cluster import LabRequest
from quiesce.lab.race.journal import Note
from quiesce.lab.race.stage import SECRET, Layout, Run, Scene, Stage
from quiesce.lab.worker import Faults
from quiesce.models.registry import resolve

REQUESTS, TOKENS = 16, 48  # of one arm of one round
BATCH = 32  # rows of a step, for the ledger's share of it
ARMS = ("A", "A'", "B")
SHARE_GOAL, WIDTH_GOAL, IDLE_GOAL, LOADED_GOAL = 0.005, 1.5, 0.001, 0.010


class Plain(Scene):
    """Two prefills, so that the donor's gate holds nobody else."""

    name, tokens = "bench", TOKENS
    layout = Layout(prefills=2, pool=16384, context=1024)

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(), Faults(release="at once", release_while=str(folder / "unsafe"))

    def run(self, stage: Stage, baseline: Sequence[int], safe: bool) -> Run:
        raise AssertionError("the bench asks by itself")


def one_arm(stage: Stage, prompts: list[list[int]]) -> dict[str, float]:
    """Tokens a second, and medians of TTFT and TPOT in seconds."""
    began = time.monotonic()
    requests = [stage.ask(prompt, "prefill-1", TOKENS) for prompt in prompts]
    stage.until(lambda: all(request.over for request in requests), "a round")
    took = time.monotonic() - began
    return {
        "tokens/s": sum(len(request.tokens) for request in requests) / took,
        "TTFT": median(_first(request) for request in requests),
        "TPOT": median((r.arrivals[-1] - r.arrivals[0]) / (len(r.tokens) - 1) for r in requests),
    }


def _first(request: LabRequest) -> float:
    assert request.first_token is not None
    return request.first_token - request.started


def happy_path(stage: Stage, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Measure -> comparison -> (mean relative difference, half of its 95 % interval)."""
    draw = random.Random(1)
    prompts = [stage.chat(f"Say {draw.randrange(10**6)} in words. " * 8) for _ in range(REQUESTS)]
    unsafe = stage.folder / "unsafe"
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    one_arm(stage, prompts)
    for number in range(rounds):
        for arm in draw.sample(ARMS, len(ARMS)):
            unsafe.touch() if arm == "B" else unsafe.unlink(missing_ok=True)
            found[arm].append(one_arm(stage, prompts))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    unsafe.unlink(missing_ok=True)
    return {
        measure: {
            "hold on / off (A / B)": _interval(found["A"], found["B"], measure),
            "the same twice (A / A')": _interval(found["A"], found["A'"], measure),
        }
        for measure in ("tokens/s", "TTFT", "TPOT")
    }


def _interval(left: list[dict[str, float]], right: list[dict[str, float]], measure: str) -> tuple[float, float]:
    ratios = [a[measure] / b[measure] - 1 for a, b in zip(left, right, strict=True)]
    return mean(ratios), 2.13 * stdev(ratios) / len(ratios) ** 0.5  # Student's t for 16 rounds


def ledger_share(step: float) -> float:
    """The ledger's CPU time for one decode step of `BATCH` rows, over the step's."""
    ledger = Ledger(PagePool(4096), PagePool(BATCH, "rows"))
    tids = [TransferId(1, number) for number in range(1, BATCH + 1)]
    for tid in tids:
        ledger.own(tid, 64)

    def one_step() -> None:
        for tid in tids:
            key = LeaseKey.compute(tid)
            ledger.lend(key)
            ledger.close(key, Proof.spoken(ProofKind.COMPLETED, key))

    times = []
    for _ in range(200):
        began = time.process_time()
        one_step()
        times.append(time.process_time() - began)
    return median(times) / step


def releases(stage: Stage, count: int, load: Callable[[], Any]) -> list[float]:
    """Seconds from the last landed byte of a cut request to its pages being free."""
    prompt, took = stage.chat(f"{SECRET} " * 20), []
    for _ in range(count):
        load()
        took.append(_release(stage, prompt))
    return took


def _release(stage: Stage, prompt: list[int]) -> float:
    began = time.monotonic()
    stage.gate.touch()
    cut = stage.ask(prompt, "prefill-0", 8)
    stage.until(lambda: stage.pages_of("posted", began), "its write to be posted")
    stage.cut_decode_leg(cut)
    stage.until(lambda: stage.pages_of("ended", began), "decode to hear of the cut")
    stage.gate.unlink()
    stage.until(lambda: _returned(stage.notes(began)), "its pages to be free")
    return _returned(stage.notes(began))


def _returned(notes: list[Note]) -> float:
    """0: not yet."""
    landed = next((note for note in notes if note.event == "landed"), None)
    if landed is None:
        return 0.0
    pages = set(landed.pages)
    return next((n.at - landed.at for n in notes if n.event == "returned" and pages <= set(n.pages)), 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.safety", description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--releases", type=int, default=50)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qs-") as folder:
        log = Path(tempfile.gettempdir()) / f"{Path(folder).name}.log"
        with Stage(resolve("smollm2"), Path(folder), Plain(), True, log=log) as stage:
            compared = happy_path(stage, asked.rounds)
            step = one_arm(stage, [stage.chat("Count from 1 to 100.")] * REQUESTS)["TPOT"]
            idle = releases(stage, asked.releases, lambda: None)
            busy = [stage.ask(stage.chat("Count from 1 to 100."), "prefill-1", 900) for _ in range(8)]
            stage.until(lambda: all(request.tokens for request in busy), "eight answers to run")
            loaded = releases(stage, asked.releases, lambda: _keep(stage, busy))
        log.unlink()
    return report(compared, ledger_share(step), step, idle, loaded)


def _keep(stage: Stage, busy: list[LabRequest]) -> None:
    """Eight answers always run."""
    for position, request in enumerate(busy):
        if request.over:
            busy[position] = stage.ask(stage.chat("Count from 1 to 100."), "prefill-1", 900)


def report(
    compared: dict[str, dict[str, tuple[float, float]]],
    share: float,
    step: float,
    idle: list[float],
    loaded: list[float],
) -> int:
    verdicts = []
    for measure, rows in compared.items():
        (cost, half), (_, twin) = rows.values()
        for name, (middle, width) in rows.items():
            print(f"{measure:9} {name:24} {100 * middle:+6.2f} % +- {100 * width:.2f}")
        verdicts.append((f"{measure}: the interval of A / B holds zero", abs(cost) <= half))
        verdicts.append((f"{measure}: it is at most {WIDTH_GOAL} times as wide as A / A'", half <= WIDTH_GOAL * twin))
    p99 = quantiles(loaded, n=100)[98]
    print(f"ledger: {100 * share:.2f} % of a step of {1000 * step:.1f} ms")
    print(f"release, idle:   median {1000 * median(idle):.2f} ms")
    print(f"release, loaded: median {1000 * median(loaded):.2f} ms, p99 {1000 * p99:.2f} ms")
    verdicts.append((f"the ledger takes at most {100 * SHARE_GOAL} % of a step", share <= SHARE_GOAL))
    verdicts.append((f"idle release within {1000 * IDLE_GOAL:.0f} ms", median(idle) <= IDLE_GOAL))
    verdicts.append(("loaded release within a step and 10 ms (p99)", p99 <= step + LOADED_GOAL))
    for text, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
