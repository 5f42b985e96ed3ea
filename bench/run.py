"""The whole bench: Quiesce beside the peers that are installed, start-up, HTTP; table, plot, JSON, verdict."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import goals, machine, peers, plot, report, serving, startup
from bench.cases import CASES, Prompts, chosen
from bench.limits import ceiling, measured
from bench.pinned import ENOUGH, Pinned, Turns, interleave
from quiesce.engine.config import read_config
from quiesce.models.registry import DEFAULT, resolve

RESULTS = Path(__file__).parent / "results"
PARTS = ("engines", "start", "http")
BYTES = {"quiesce int8": 1.01, "quiesce int4": 0.63}  # of a weight, scales included


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench ARGS=...", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a figure to quote")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WHAT",
        help=f"this part or case, more than once for several: {', '.join([*PARTS, *(case.name for case in CASES)])}",
    )
    parser.add_argument(
        "--peer", action="append", choices=[*peers.ALL], help="only beside these (default: all that are installed)"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        action="append",
        choices=serving.LEVELS,
        help="over HTTP only this many requests at once",
    )
    parser.add_argument("--rounds", type=int, help="at most so many of each case, and bursts over HTTP")
    parser.add_argument(
        "--way", action="append", choices=serving.WAYS, help="over HTTP only this one, more than once for several"
    )
    parser.add_argument("--into", type=Path, help="add to, and replace in, the results of this JSON file")
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="core for all engines")
    wanted = parser.parse_args()
    if wanted.rounds is not None and wanted.rounds < 1:
        parser.error("--rounds is at least 1")
    if unknown := set(wanted.only) - {*PARTS, *(case.name for case in CASES)}:
        parser.error(f"there is no {', '.join(sorted(unknown))} to measure")
    return wanted


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def available(wanted: argparse.Namespace) -> list[str]:
    """Peers that can take part; says who cannot, and why."""
    found, flags = [], machine.flags()
    for name, peer in peers.ALL.items():
        if wanted.peer and name not in wanted.peer and not name.startswith("quiesce"):
            continue
        if peer.lacks(flags) or peer.dtype == wanted.dtype:
            continue
        if not peer.installed:
            say(f"{name} is left out: it is not installed (make bench-peers)")
        elif peer.weights and (wanted.model != DEFAULT or wanted.dtype != "bfloat16"):
            say(f"{name} is left out: its weights are of {DEFAULT} in bfloat16")
        else:
            found.append(name)
    return found


def leave_out(result: dict[str, Any], why: str) -> None:
    """Say so, now and before the verdict."""
    result["runs"][-1].setdefault("left_out", []).append(why)
    say(f"left out: {why}")


def engines(wanted: argparse.Namespace, folder: Path, names: list[str], result: dict[str, Any]) -> None:
    """The wanted cases, all engines loaded and taking turns on one core."""
    only = [name for name in wanted.only if name not in PARTS]
    cases = chosen(only, names)
    config, prompts = read_config(folder), Prompts(folder)
    limits = measured(wanted.core, wanted.dtype, config)
    result["limits"] = limits
    with ExitStack() as stack:
        opened: dict[str, Pinned] = {}
        for name in [name for name in names if any(name in case.rivals for case in cases)]:
            say(f"loading {name}")
            peer = peers.ALL[name]
            model = peers.GGUF[peer.weights] if peer.weights else folder
            try:
                opened[name] = stack.enter_context(Pinned(peer, model, wanted.dtype, wanted.core))
            except RuntimeError as error:
                if name.startswith("quiesce"):
                    raise
                leave_out(result, f"{name}: {error}")
        for case in chosen(only, list(opened)):
            rounds = 3 if wanted.quick else 5 if case.kind == "requests" or case.prompt > 4096 else 9
            rounds = min(rounds, wanted.rounds or rounds)
            say(f"measuring {case.name}, {wanted.dtype}, up to {rounds} rounds in turn on core {wanted.core}")
            turns: list[Turns] = [opened[name] for name in case.rivals if name in opened]
            windows = interleave(turns, case, prompts, rounds, partial(leave_out, result))
            opened = {name: one for name, one in opened.items() if one in turns or name not in case.rivals}
            weight = next((BYTES[name] for name in case.rivals if name in BYTES), None)
            top = ceiling(case, config, wanted.dtype, limits, weight)
            result["engines"][case.name] = report.compare(
                case.name, wanted.dtype, windows, ceiling=top, enough=ENOUGH
            )


def earlier(path: Path | None) -> dict[str, Any]:
    """The results so far of `--into`, or none."""
    found = json.loads(path.read_text()) if path and path.exists() else {}
    return {
        "runs": found.get("runs", []),
        "limits": found.get("limits"),
        "engines": {name: report.compared_of(one) for name, one in found.get("engines", {}).items()},
        "first_answer_s": report.Spread(**found["first_answer_s"]) if found.get("first_answer_s") else None,
        "idle_gib": found.get("idle_gib", {}),
        "serving": report.serving_of(found.get("serving", {})),
    }


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of every `with`: no engine is left behind
    wanted = options()
    noise = machine.noise("before the bench")
    folder, names = resolve(wanted.model), available(wanted)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = earlier(wanted.into)
    result["runs"].append(
        {"time": now, "machine": machine.describe(), "argv": sys.argv[1:], "core": wanted.core, "noise": noise}
    )
    path = wanted.into or RESULTS / f"{now.replace(':', '').removesuffix('+0000')}.json"
    code = 1
    try:
        measure(wanted, folder, names, result)
    finally:  # also of what was measured before a fault or a SIGTERM
        code = conclude(result, path)
    return code


def measure(wanted: argparse.Namespace, folder: Path, names: list[str], result: dict[str, Any]) -> None:
    """The wanted parts, each into `result` as soon as it is there."""
    parts = [part for part in PARTS if not wanted.only or part in wanted.only]
    if "engines" in parts or set(wanted.only) - set(PARTS):
        engines(wanted, folder, names, result)
    if "start" in parts:
        say("starting quiesce serve")
        result["first_answer_s"], result["idle_gib"] = startup.first_answers(wanted.model, 1 if wanted.quick else 3)
    if "http" in parts:
        makers = serving.ways(wanted.model, folder, wanted.dtype, names, wanted.way or serving.WAYS)
        levels = wanted.at_once or serving.LEVELS
        rounds = wanted.rounds or (2 if wanted.quick else 5)
        lost = partial(leave_out, result)
        serving.measure(makers, Prompts(folder), levels, rounds, say, lost, result["serving"])


def conclude(result: dict[str, Any], path: Path) -> int:
    """Tables, files, warnings, and the verdict last."""
    order = [case.name for case in CASES]
    compared = sorted(result["engines"].values(), key=lambda one: order.index(one.case))
    verdict = [
        *goals.speed(compared),
        *goals.served(result["serving"]),
        *goals.started(result["first_answer_s"], result["idle_gib"]),
    ]
    warnings = [run["noise"] for run in result["runs"][-1:] if run["noise"]] + report.doubts(compared)
    tables = []
    if compared:
        tables.append(report.engines_table(compared))
    if result["serving"]:
        tables.append(report.serving_table(result["serving"]))
    if result["first_answer_s"]:
        tables.append(f"seconds from `quiesce serve` to the first answer: {result['first_answer_s'].text(1)}")
    if any("vllm float32" in one.against for one in compared):
        tables.append(peers.FLOAT32_TOO)
    text = "\n\n".join(tables)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_json(result | {"verdict": verdict}), indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    print(text, end="\n\n")
    if plot.draw(compared, result["serving"], path.with_suffix(".svg")):
        print(f"plot: {path.with_suffix('.svg')}")
    else:
        print("no plot: matplotlib is not installed (pip install 'quiesce[plot]')")
    print(f"details: {path}")
    for line in warnings:
        print(f"warning: {line}")
    for line in result["runs"][-1].get("left_out", []):
        print(f"left out: {line.splitlines()[0]}")
    for goal in verdict:
        print(goal.text())
    return 0 if all(goal.met for goal in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
