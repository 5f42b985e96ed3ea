"""The figures of bench.transfer with their goals: for people, as a table, and kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARE = {"shm": 0.90, "tcp": 0.90}  # of the bare loop's bandwidth; others:
SHARE_OF_OTHERS = 0.95
MICROSECONDS = {"shm": 100.0, "tcp": 200.0}  # from a post of one page until the owner is told
BEHIND_TCP = ("nixl/tcp", "mooncake/tcp")  # whose bandwidth ours over tcp has to exceed

Result = dict[str, Any]


def goal(engine: str) -> float:
    return SHARE.get(engine, SHARE_OF_OTHERS)


def lines(found: Result) -> list[str]:
    engine, said = found["engine"], []
    for case in found["cases"]:
        met = "met" if case["share"] >= goal(engine) else "MISSED"
        said.append(
            f"{engine:<12} {case['case']:<46} {case['layer_gb_s']:6.2f} GB/s  bare {case['bare_gb_s']:6.2f} GB/s  "
            f"{case['share']:6.1%} of it (CPU {case['cpu_share']:.1%})  goal {goal(engine):.0%} {met}"
        )
    if (took := found["latency_us"]) is not None:
        most = MICROSECONDS.get(engine)
        word = "" if most is None else f"  goal {most:.0f} us {'met' if took <= most else 'MISSED'}"
        said.append(f"{engine:<12} {'one page of 23 KiB, from post to told':<46} {took:6.0f} us{word}")
    return said


def missed(results: list[Result]) -> list[str]:
    """Goals that were measured and not met, tcp's against the others' over tcp among them."""
    found = []
    for result in results:
        engine, took = result["engine"], result["latency_us"]
        found += [f"{engine}: {case['case']}" for case in result["cases"] if case["share"] < goal(engine)]
        if took is not None and took > MICROSECONDS.get(engine, took):
            found.append(f"{engine}: latency")
    speeds = {result["engine"]: {case["key"]: case["layer_gb_s"] for case in result["cases"]} for result in results}
    for key, ours in speeds.get("tcp", {}).items():
        for other in BEHIND_TCP:
            if speeds.get(other, {}).get(key, 0.0) >= ours:
                found.append(f"tcp is not ahead of {other}: {key}")
    return found


def keep(path: Path, results: list[Result], machine: dict[str, object]) -> list[Result]:
    """All that the file holds now: a case that was measured again replaces what was kept of it."""
    kept = json.loads(path.read_text()) if path.exists() else {"results": []}
    known = {result["engine"]: result for result in kept["results"]}
    for new in results:
        old = known.setdefault(new["engine"], {"engine": new["engine"], "cases": [], "latency_us": None})
        again = {case["key"] for case in new["cases"]}
        old["cases"] = [case for case in old["cases"] if case["key"] not in again] + new["cases"]
        if new["latency_us"] is not None:
            old["latency_us"] = new["latency_us"]
    together = list(known.values())
    path.write_text(json.dumps({"results": together, "machine": machine}, indent=1) + "\n")
    return together


def table(kept: dict[str, Any]) -> list[str]:
    """Markdown."""
    found = [
        "| | " + " | ".join(COLUMNS.values()) + " | one page, post to told |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for result in kept["results"]:
        cases = {case["key"]: case for case in result["cases"]}
        cells = [_cell(result["engine"], cases.get(key)) for key in COLUMNS]
        took, most = result["latency_us"], MICROSECONDS.get(result["engine"])
        late = (
            "" if took is None else f"{took:.0f} us" + ("" if most is None or took <= most else f" (goal {most:.0f})")
        )
        found.append(f"| {result['engine']} | " + " | ".join([*cells, late]) + " |")
    return found


COLUMNS = {
    "pages": "2,000 pages of 23 KiB",
    "crowd": "32 transfers of 200 such pages",
    "block": "one block of 64 MiB",
}


def _cell(engine: str, case: Result | None) -> str:
    if case is None:
        return ""
    met = "" if case["share"] >= goal(engine) else f" (goal {goal(engine):.0%})"
    return f"{case['layer_gb_s']:.2f} of {case['bare_gb_s']:.2f} GB/s, **{case['share']:.0%}**{met}"
