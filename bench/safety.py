"""`make bench-safety`: what holding costs. One cluster, one run, the rule on and off in turns.

    python -m bench.safety [--rounds 16] [--releases 50] [--into FILE] [--seconds 200] [--only happy|abort|report]

Three arms, in a new order each round: A and A' with the ledger, B with pages freed at once (decode looks at a file,
so that processes, memory and caches are the same). Nobody is cut: this is the happy path. Then the abort path: how
long after the write of a cut request was let go its pages are free, on an idle engine and on one that decodes.

With `--into` what was measured is added to a file, and the report is about all that is in it: a machine that is quiet
only now and then is measured in pieces.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any

from bench.machine import describe
from quiesce.lab.cluster import LabRequest
from quiesce.lab.race.journal import Note
from quiesce.lab.race.stage import DECODE, SECRET, Layout, Run, Scene, Stage
from quiesce.lab.worker import Faults
from quiesce.models.registry import resolve

REQUESTS, TOKENS = 16, 48  # of one arm of one round
ARMS = ("A", "A'", "B")
MEASURES = ("tokens/s", "TTFT", "TPOT")
SHARE_GOAL, WIDTH_GOAL, IDLE_GOAL, LOADED_GOAL = 0.005, 1.5, 0.001, 0.010
BUSY = 6  # answers that run on the loaded engine, which takes two more

Found = dict[str, Any]


class Plain(Scene):
    """Two prefills, so that the donor's gate holds nobody else."""

    name, tokens = "bench", TOKENS
    layout = Layout(prefills=2, pool=16384, context=1024)

    def faults(self, folder: Path, safe: bool) -> tuple[Faults, Faults]:
        return Faults(), Faults(release="at once", release_while=str(folder / "unsafe"), time_ledger=True)

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


def happy_path(stage: Stage, rounds: int, until: float) -> Found:
    """{"rounds": [{arm: {measure: value}}]} of as many rounds as there is time for, {"ledger": seconds of CPU time
    for one step, "step": seconds}."""
    draw = random.Random()
    prompts = [stage.chat(f"Say {draw.randrange(10**6)} in words. " * 8) for _ in range(REQUESTS)]
    unsafe = stage.folder / "unsafe"
    found: list[dict[str, dict[str, float]]] = []
    one_arm(stage, prompts)
    before = ledger_time(stage)
    while len(found) < rounds and time.monotonic() < until:
        done = {}
        for arm in draw.sample(ARMS, len(ARMS)):
            unsafe.touch() if arm == "B" else unsafe.unlink(missing_ok=True)
            done[arm] = one_arm(stage, prompts)
        found.append(done)
        print(f"round {len(found)} of {rounds}", file=sys.stderr)
    unsafe.unlink(missing_ok=True)
    spent, steps = (after - first for after, first in zip(ledger_time(stage), before, strict=True))
    return {"rounds": found, "ledger": spent / steps, "step": median(done["A"]["TPOT"] for done in found)}


def ledger_time(stage: Stage) -> tuple[float, float]:
    """(seconds of CPU time in decode's ledger, those who watch it included; steps) so far."""
    state = stage.cluster.inspect(DECODE)
    return state["ledger_seconds"], state["steps"]


def releases(stage: Stage, count: int, until: float, load: Callable[[], Any]) -> list[list[float]]:
    """For each cut request, seconds until its pages are free: since its write was told to have landed, and since it
    was let go, which is more: the copying and the mover's way to tell it are in it."""
    prompt = stage.chat(f"{SECRET} Say it.")
    took: list[list[float]] = []
    while len(took) < count and time.monotonic() < until:
        load()
        took.append(_release(stage, prompt))
    return took


def _release(stage: Stage, prompt: list[int]) -> list[float]:
    began = time.monotonic()
    stage.gate.touch()
    cut = stage.ask(prompt, "prefill-0", 8)
    stage.until(lambda: stage.pages_of("posted", began), "its write to be posted")
    stage.cut_decode_leg(cut)
    stage.until(lambda: stage.pages_of("ended", began), "decode to hear of the cut")
    stage.gate.unlink()
    stage.until(lambda: _returned(stage.notes(began)), "its pages to be free")
    return _returned(stage.notes(began))


def _returned(notes: list[Note]) -> list[float]:
    """Empty: not yet."""
    landed = next((note for note in notes if note.event == "landed"), None)
    if landed is None:
        return []
    let_go = next(note for note in notes if note.event == "released" and note.pages == landed.pages)
    pages = set(landed.pages)
    free = next((note for note in notes if note.event == "returned" and pages <= set(note.pages)), None)
    return [] if free is None else [free.at - landed.at, free.at - let_go.at]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.safety", description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--releases", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3600.0, help="rounds begin no later than that")
    parser.add_argument("--into", type=Path, help="a file of what was measured so far, which this run adds to")
    parser.add_argument("--only", choices=("happy", "abort", "report"))
    asked = parser.parse_args()
    found = [] if asked.into is None or not asked.into.exists() else asked.into.read_text("utf-8").splitlines()
    known: list[Found] = [json.loads(line) for line in found]
    if asked.only != "report":
        known.append(measure(asked, time.monotonic() + asked.seconds))
        if asked.into is not None:
            with asked.into.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[-1]) + "\n")
    return report(known)


def measure(asked: argparse.Namespace, until: float) -> Found:
    done: Found = {"machine": describe()}
    with tempfile.TemporaryDirectory(prefix="qs-") as folder:
        log = Path(tempfile.gettempdir()) / f"{Path(folder).name}.log"
        with Stage(resolve("smollm2"), Path(folder), Plain(), True, log=log) as stage:
            if asked.only != "abort":
                done |= happy_path(stage, asked.rounds, until)
            if asked.only != "happy":
                done["idle"] = releases(stage, asked.releases, until, lambda: None)
                busy = [_endless(stage) for _ in range(BUSY)]
                stage.until(lambda: all(request.tokens for request in busy), "the answers to run")
                done["loaded"] = releases(stage, asked.releases, until, lambda: _keep(stage, busy))
                done["loaded_step"] = median(b - a for r in busy for a, b in pairwise(r.arrivals))
        log.unlink()
    return done


def _endless(stage: Stage) -> LabRequest:
    return stage.ask(stage.chat("Count from 1 to 100."), "prefill-1", 900)


def _keep(stage: Stage, busy: list[LabRequest]) -> None:
    """So many answers always run."""
    for position, request in enumerate(busy):
        if request.over:
            busy[position] = _endless(stage)


# ------------------------------------------------------------ the report


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval: Student's t, by its expansion in 1/n, right to 0.1 % from 8 values on."""
    left = len(values) - 1
    t = 1.96 + 2.37 / left + 2.82 / left**2
    return mean(values), t * stdev(values) / len(values) ** 0.5


def report(known: list[Found]) -> int:
    rounds = [done for found in known for done in found.get("rounds", ())]
    verdicts: list[tuple[str, bool]] = []
    print(f"{len(rounds)} rounds of {len(ARMS)} arms, {REQUESTS} requests of {TOKENS} tokens each")
    for measured in MEASURES if len(rounds) > 1 else ():
        verdicts += _compare(rounds, measured)
    steps = [(found["ledger"], found["step"]) for found in known if "ledger" in found]
    if steps:
        share = mean(ledger / step for ledger, step in steps)
        print(f"ledger: {1e6 * mean(spent for spent, _ in steps):.0f} us of a step of {1000 * steps[-1][1]:.1f} ms")
        verdicts.append(
            (f"the ledger takes {100 * share:.2f} %, at most {100 * SHARE_GOAL} % of a step", share <= SHARE_GOAL)
        )
    idle, loaded = ([one for found in known for one in found.get(name, ())] for name in ("idle", "loaded"))
    if idle and loaded:
        step = median(found["loaded_step"] for found in known if "loaded_step" in found)
        verdicts += _abort_path(idle, loaded, step)
    for text, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    return 0 if all(holds for _, holds in verdicts) else 1


def _compare(rounds: list[dict[str, dict[str, float]]], measured: str) -> list[tuple[str, bool]]:
    unit, scale = ("", 1.0) if measured == "tokens/s" else (" ms", 1000.0)
    for arm in ARMS:
        middle, half = interval([scale * done[arm][measured] for done in rounds])
        print(f"{measured:9} {arm:3} {middle:9.2f} +- {half:.2f}{unit}")
    (cost, half), (same, twin) = (
        interval([done["A"][measured] / done[other][measured] - 1 for done in rounds]) for other in ("B", "A'")
    )
    print(f"{measured:9} hold on / off (A / B)   {100 * cost:+6.2f} % +- {100 * half:.2f}")
    print(f"{measured:9} the same twice (A / A') {100 * same:+6.2f} % +- {100 * twin:.2f}")
    return [
        (f"{measured}: the interval of A / B holds zero", abs(cost) <= half),
        (
            f"{measured}: it is {half / twin:.2f} times as wide as A / A', at most {WIDTH_GOAL}",
            half <= WIDTH_GOAL * twin,
        ),
    ]


def _abort_path(idle: list[list[float]], loaded: list[list[float]], step: float) -> list[tuple[str, bool]]:
    for name, taken in (("idle", idle), ("loaded", loaded)):
        for since, column in (("told to have landed", 0), ("let go", 1)):
            times = sorted(1000 * one[column] for one in taken)
            p99 = quantiles(times, n=100)[98]
            print(
                f"release, {name:6} since {since:19}: median {median(times):.2f} ms, p99 {p99:.2f} ms, n {len(times)}"
            )
    # The mover tells within 0.1 ms of the last byte (`make bench-transfer`); before that it copies.
    middle, p99 = median(one[0] for one in idle), quantiles([one[1] for one in loaded], n=100)[98]
    print(f"a step of the loaded engine: {1000 * step:.1f} ms")
    return [
        (f"idle: free within {1000 * IDLE_GOAL:.0f} ms of being told to have landed (median)", middle <= IDLE_GOAL),
        ("loaded: within a step and 10 ms of being let go (p99)", p99 <= step + LOADED_GOAL),
    ]


if __name__ == "__main__":
    sys.exit(main())
