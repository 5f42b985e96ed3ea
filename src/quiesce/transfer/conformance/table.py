"""The table of docs/transports.md: engine x lane x capability, every cell measured by the suite, or `none`.

    python -m quiesce.transfer.conformance.table FOLDER [REPORT.json ...]

takes reports of `quiesce conformance NAME --json` into FOLDER/transports.json and writes the table anew between its
marks in FOLDER/transports.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quiesce.transfer.conformance import endurance
from quiesce.transfer.mori import CAPABILITIES as MORI

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NONE = "none"
ORDER = ("shm", "tcp", "nixl", "mooncake", "mori")  # of the columns; what others bring comes last

Caps = dict[str, Any]

# what is claimed -> what is shown in its cell, and the checks that have to have passed for it
ROWS: list[tuple[str, Callable[[Caps], str | bool], tuple[str, ...]]] = [
    ("push", lambda caps: caps["push"], ("page_lists_of_every_shape", "posts_are_ordered")),
    ("pull", lambda caps: caps["pull"], ("reads_of_every_shape",)),
    ("PLACED means", lambda caps: caps["placed_means"], ("placed_means_visible",)),
    ("refuses what is outside, or under another generation", lambda caps: True, ("outside_is_refused",)),
    ("knows what it has lent", lambda caps: True, ("what_was_not_lent_is_refused",)),
    ("cancels what has not started", lambda caps: caps["cancels_queued"], ("cancelled_posts_never_land",)),
    ("a reported failure is terminal", lambda caps: caps["failure_is_terminal"], ("no_failure_lands_late",)),
    ("drain", lambda caps: caps["drain"], ("placed_means_visible", "no_failure_lands_late")),
    ("fence of a peer that writes", lambda caps: caps["fence"], ("fence_is_final", "a_stopped_poster_is_fenced")),
    ("... its cost", lambda caps: caps["fence_cost"], ("fence_is_final",)),
    ("fence of pages alone", lambda caps: caps["fence"] == "page", ("fence_of_pages_disturbs_no_others",)),
    ("fence of a peer that reads", lambda caps: caps["fences_readers"], ("a_source_can_revoke_reads",)),
    ("fence of own reads", lambda caps: True, ("a_fence_of_own_reads_is_final",)),
    ("death of a writer is noticed, and proven if claimed", lambda caps: True, ("death_of_the_poster_is_shown",)),
    ("a lender's death ends posts", lambda caps: True, ("death_of_the_lender_ends_posts",)),
    ("a stopped lender fails nothing", lambda caps: True, ("a_stopped_lender_fails_nothing",)),
    ("a restarted peer is another", lambda caps: True, ("a_restarted_poster_is_another",)),
    ("10,000 transfers grow nothing", lambda caps: True, ("ten_thousand_transfers_grow_nothing",)),
]


def cell(report: dict[str, Any], claim: Callable[[Caps], str | bool], checks: tuple[str, ...]) -> str:
    """What was measured; `none` for what is not claimed, was not run, or did not hold."""
    results = {result["check"]: result["result"] for result in report["checks"]}
    claimed = claim(report["capabilities"])
    if not claimed or claimed == NONE or any(results.get(check) != "ok" for check in checks):
        return NONE
    scale = report.get("scale", 1.0)
    if endurance.ten_thousand_transfers_grow_nothing.__name__ in checks and scale < 1:
        return f"yes ({round(endurance.TRANSFERS * scale)})"
    return "yes" if claimed is True else str(claimed)


def table(reports: dict[str, dict[str, Any]]) -> str:
    names = sorted(reports, key=lambda name: (ORDER.index(n) if (n := name.partition("/")[0]) in ORDER else 9, name))
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for title, claim, checks in ROWS:
        lines.append(f"| {title} | " + " | ".join(cell(reports[name], claim, checks) for name in names) + " |")
    run = {name: sum(r["result"] in ("ok", "not claimed") for r in reports[name]["checks"]) for name in names}
    lines.append("| checks run | " + " | ".join(str(run[name]) for name in names) + " |")
    return "\n".join(lines)


def label(report: dict[str, Any]) -> str:
    caps = report["capabilities"]
    return f"{caps['name']}/{caps['lane']}" if caps["lane"] else str(caps["name"])


def write(folder: Path, reports: list[dict[str, Any]]) -> None:
    """Raises ValueError for a document without its marks."""
    kept = folder / "transports.json"
    known: dict[str, dict[str, Any]] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    unrun = {"engine": "mori", "capabilities": asdict(MORI), "checks": []}
    known.setdefault(label(unrun), unrun)
    known.update({label(report): report for report in reports})
    kept.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    page = folder / "transports.md"
    text = page.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no place for the table: {BEGIN} ... {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table(known)}\n{END}{after}", "utf-8")


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    reports = [json.loads(Path(name).read_text("utf-8")) for name in arguments[1:]]
    write(Path(arguments[0]), reports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
