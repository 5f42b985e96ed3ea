"""The checks in order, and their results for people and machines."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from quiesce.transfer.conformance import bench, deaths, endurance, reads, writes
from quiesce.transfer.conformance.bench import Bench, Nonconforming, NotClaimed
from quiesce.transfer.conformance.party import load
from quiesce.transfer.registry import MissingEngine

Check = Callable[[Bench], None]

CHECKS: list[Check] = [
    writes.placed_means_visible,
    writes.page_lists_of_every_shape,
    writes.posts_are_ordered,
    writes.cancelled_posts_never_land,
    writes.outside_is_refused,
    writes.wrong_generation_is_refused,
    writes.what_was_not_lent_is_refused,
    deaths.fence_is_final,
    deaths.fence_of_pages_disturbs_no_others,
    deaths.death_of_the_poster_is_shown,
    deaths.a_stopped_poster_is_fenced,
    deaths.a_restarted_poster_is_another,
    deaths.death_of_the_lender_ends_posts,
    deaths.a_stopped_lender_fails_nothing,
    deaths.posts_race_close,
    deaths.no_failure_lands_late,
    reads.reads_of_every_shape,
    reads.wrong_reads_are_refused,
    reads.a_fence_of_own_reads_is_final,
    reads.a_source_can_revoke_reads,
    reads.death_of_the_source_ends_reads,
    reads.death_of_the_reader_is_shown,
    endurance.peers_do_not_mix,
    endurance.reconnecting_leaks_nothing,
    endurance.ten_thousand_transfers_grow_nothing,
]


def run(check: Check, engine: str) -> str | None:
    """One check on a bench of its own. None: it holds; otherwise what the engine does not claim. Raises
    Nonconforming."""
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        parties = Bench(engine, Path(folder))
        try:
            check(parties)
        except NotClaimed as said:
            return str(said)
        finally:
            parties.close()
    return None


def check_engine(engine: str, checks: list[Check]) -> Iterator[dict[str, Any]]:
    """A result a check: name, result (ok, failed, not claimed), said, seconds."""
    for check in checks:
        began = time.monotonic()
        try:
            said = run(check, engine)
            result = "ok" if said is None else "not claimed"
        except Nonconforming as error:
            said, result = str(error), "failed"
        yield {
            "check": check.__name__,
            "result": result,
            "said": said or "",
            "seconds": round(time.monotonic() - began, 2),
        }


def capabilities(engine: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        transport, _ = load(engine, Path(folder), 1, 1, 4096)
        try:
            return asdict(transport.caps)
        finally:
            transport.close_all()


def report(engine: str, names: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the checks of these names, all for none. Raises ValueError for a name that is none."""
    known = {check.__name__: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no check {unknown[0]!r}; there are {', '.join(known)}")
    caps = capabilities(engine)
    say(f"{engine}: " + ", ".join(f"{name} {value}" for name, value in caps.items() if name != "name"))
    results = []
    for result in check_engine(engine, [known[name] for name in names] or CHECKS):
        results.append(result)
        said = f": {result['said']}" if result["said"] else ""
        say(f"{result['result']:<12}{result['seconds']:>7.2f} s  {result['check']}{said}")
    return {"engine": engine, "capabilities": caps, "checks": results, "scale": bench.SCALE}


def command(engine: str, names: list[str], *, as_json: bool) -> int:
    """`quiesce conformance`: 0 when nothing failed, 1 when something did, 2 when it could not be tried."""
    say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
    try:
        found = report(engine, names, say)
    except (MissingEngine, ValueError, OSError, ImportError, AttributeError) as error:
        print(f"quiesce conformance {engine}: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(found))
    return int(any(result["result"] == "failed" for result in found["checks"]))
