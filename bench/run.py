"""The whole bench: engines, start-up, HTTP, table, JSON, verdict. `python -m bench.run --help`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench import machine, report, startup
from bench.cases import CASES
from bench.limits import Limits, ceiling
from bench.pinned import ENOUGH, Pinned, interleave
from quiesce.engine.config import read_config
from quiesce.models.registry import DEFAULT, resolve

RESULTS = Path(__file__).parent / "results"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a figure to quote")
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), action="append", help="only this one")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="core for all engines")
    parser.add_argument("--only", choices=("engines", "serving"), help="leave the other part, and its goals, out")
    return parser.parse_args()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def engines(folder: Path, dtype: str, core: int, rounds: int) -> tuple[Limits, list[report.Compared]]:
    """All cases in one dtype, both engines loaded and taking turns on one core."""
    config = read_config(folder)
    with Pinned("limits", folder, dtype, core) as limits_process:
        limits = Limits(**limits_process.ask())
    compared = []
    with Pinned("quiesce", folder, dtype, core) as ours, Pinned("transformers", folder, dtype, core) as theirs:
        for case in CASES:
            say(f"measuring {case.name}, {dtype}, {rounds} rounds in turn on core {core}")
            windows = interleave([ours, theirs], case, rounds)
            top = ceiling(case, config, dtype, limits)
            compared.append(report.compare(case.name, dtype, windows, ceiling=top, enough=ENOUGH))
    return limits, compared


def main() -> int:
    wanted = options()
    warnings = [text for text in [machine.noise("before the bench")] if text]
    for text in warnings:
        say(f"warning: {text}")
    folder = resolve(wanted.model)
    rounds, starts, requests = (3, 1, 3) if wanted.quick else (9, 3, 9)
    result: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "quick": wanted.quick,
        "core": wanted.core,
        "limits": {},
    }
    compared: list[report.Compared] = []
    first: report.Spread | None = None
    if wanted.only != "serving":
        for dtype in wanted.dtype or ["bfloat16", "float32"]:
            result["limits"][dtype], more = engines(folder, dtype, wanted.core, rounds)
            compared += more
        print(report.engines_table(compared), end="\n\n")
    if wanted.only != "engines":
        say(f"starting quiesce serve {starts} times, then one client to each way of serving")
        first = startup.first_answers(wanted.model, starts)
        result["serving"] = startup.latencies(wanted.model, requests)
        print(report.serving_table(result["serving"]))
        print(f"seconds from `quiesce serve` to the first answer: {first.text(1)}", end="\n\n")
    warnings += report.doubts(compared)
    goals = report.goals(compared, first)
    result |= {"engines": compared, "first_answer_s": first, "goals": goals, "warnings": warnings}
    result["load_average_after"] = os.getloadavg()[0]
    print(f"details: {write(result)}")
    for text in warnings:
        print(f"warning: {text}")
    for goal in goals:
        print(goal.text())
    return 0 if all(goal.met for goal in goals) else 1


def write(result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['time'].replace(':', '').removesuffix('+0000')}.json"
    path.write_text(json.dumps(report.as_json(result), indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
