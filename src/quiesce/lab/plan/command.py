"""`quiesce plan`: from the options to the tables, the check, the curves."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from quiesce.lab.plan.case import Case, Course, Sizes
from quiesce.lab.plan.course import Simulation
from quiesce.lab.plan.draw import check_targets, draw
from quiesce.lab.plan.figures import Figures, as_json, figures
from quiesce.lab.plan.options import Cluster, Holds, Output, Workload
from quiesce.lab.plan.requests import NEVER, PlanError, Requests, requests_of
from quiesce.lab.plan.sizing import Need, binding, needs, with_workers

EXIT_DISAGREES, EXIT_REFUSED = 1, 2
CALM = "no storm"
LEGEND = (
    "worst: share of one worker's pool that was held. cut: requests that a restart ended. no holds: pages go back at "
    "once, which is unsafe and only here to compare with. answered: every ABORT is. fenced: from the storm on, none "
    "is, and pages come back by a fence. no proof: nor can a fence be had. What holds add is a difference of two "
    "runs: where it is small, it is luck."
)


def sizes_of(cluster: Cluster, holds: Holds, requests: Requests) -> Sizes:
    """Raises PlanError."""
    for name in ("page_size", "page_bytes", "prefill_pages", "decode_pages", "max_running_requests", "prefill_speed",
                 "decode_speed", "chunked_prefill_size", "transport", "post_window", "target"):  # fmt: skip
        if not 0 < getattr(cluster, name) < NEVER:
            raise PlanError(f"--{name.replace('_', '-')} must be above 0, not {getattr(cluster, name)}")
    for name, count in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        if count is not None and count < 1:
            raise PlanError(f"--{name} must be at least 1, not {count}")
    if cluster.target > 1:
        raise PlanError(f"--target is a share of a worker's capacity, at most 1, not {cluster.target}")
    sizes = Sizes(
        prefills=1,
        decodes=1,
        page_size=cluster.page_size,
        prefill_pages=cluster.prefill_pages,
        decode_pages=cluster.decode_pages,
        max_running=cluster.max_running_requests,
        prefill_speed=cluster.prefill_speed,
        decode_speed=cluster.decode_speed,
        chunk_pages=max(1, cluster.chunked_prefill_size // cluster.page_size),
        page_seconds=cluster.page_bytes / (cluster.transport * 1e9),
        window=cluster.post_window,
        max_retained=holds.max_retained,
        drain_timeout=holds.drain_timeout,
        restart=holds.restart,
    )
    return with_workers(requests, sizes, cluster.target, cluster.prefill, cluster.decode)


def cases_of(holds: Holds, requests: Requests) -> list[Case]:
    """As asked for, then a storm in the middle, with answers and without; each beside pages that go back at once."""
    for name in ("ack_latency", "loss", "hold_timeout", "fence", "max_retained", "drain_timeout", "restart", "storm",
                 "storm_seconds", "outage"):  # fmt: skip
        value = getattr(holds, name)
        if value is not None and not 0 <= value <= (1 if name in ("loss", "storm") else sys.float_info.max):
            raise PlanError(f"--{name.replace('_', '-')} cannot be {value}")
    middle = requests.seconds / 2
    storm = (middle, middle + holds.storm_seconds, holds.storm)
    dead = (middle, NEVER if holds.outage is None else middle + holds.outage)
    calm = Case(
        CALM,
        ack=holds.ack_latency / 1000,
        loss=min(holds.loss, 0.999),
        hold_timeout=holds.hold_timeout,
        fence=holds.fence,
        disrupts=holds.fence_disrupts,
    )
    stormy = replace(calm, name="storm, answered", storm=storm)
    return [
        replace(calm, name=f"{CALM}, no holds", holds=False),
        calm,
        replace(stormy, name="storm, no holds", holds=False),
        stormy,
        replace(stormy, name="storm, fenced", dead=dead),
        replace(stormy, name="storm, no proof", dead=dead, fence=None),
    ]


def run(workload: Workload, cluster: Cluster, holds: Holds, output: Output, console: Console | None = None) -> int:
    console = console or Console()
    try:
        check_targets(output.plot or [])
        if output.json is not None and not output.json.parent.is_dir():
            raise PlanError(f"there is no folder {output.json.parent} to write {output.json.name} into")
        requests = requests_of(workload)
        sizes = sizes_of(cluster, holds, requests)
        cases = cases_of(holds, requests)
    except PlanError as error:
        print(f"quiesce: {error}", file=sys.stderr)
        return EXIT_REFUSED
    began = time.monotonic()
    courses = _simulate(requests, sizes, cases, console)
    found = [figures(course) for course in courses]
    say(console, requests, sizes, found, needs(requests, sizes), cluster)
    title = about(requests, sizes)
    if output.plot:
        draw(courses, title, output.plot)
        console.print(f"drawn: {', '.join(map(str, output.plot))}", highlight=False)
    if output.json is not None:
        output.json.write_text(json.dumps(everything(courses, found, requests, sizes), indent=1) + "\n", "utf-8")
    console.print(f"\n{len(requests):,} requests, {len(cases)} times, in {time.monotonic() - began:.0f} s\n")
    from quiesce.lab.plan.verdict import verdict  # noqa: PLC0415  (loads the whole product: after the answer is there)

    judged = verdict(found, workload.seed, thorough=output.check)
    for line in judged.lines:
        console.print(line, highlight=False, markup=False)
    return 0 if judged.agrees else EXIT_DISAGREES


def _simulate(requests: Requests, sizes: Sizes, cases: list[Case], console: Console) -> list[Course]:
    courses = []
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(cases) * len(requests))
        for number, case in enumerate(cases):
            bar.update(task, description=case.name)
            done = number * len(requests)
            simulation = Simulation(requests, sizes, case)
            courses.append(simulation.run(partial(_advance, bar, task, done)))
    return courses


def _advance(bar: Progress, task: TaskID, before: int, done: int) -> None:
    bar.update(task, completed=before + done)


# ------------------------------------------------------------ what is said


def about(requests: Requests, sizes: Sizes) -> str:
    return (
        f"{len(requests):,} requests, {requests.rate:,.3g} a second; {sizes.prefills:,} prefill and "
        f"{sizes.decodes:,} decode workers of {sizes.decode_pages:,} pages"
    )


def say(
    console: Console, requests: Requests, sizes: Sizes, found: list[Figures], need: list[Need], cluster: Cluster
) -> None:
    console.print(
        f"\n{about(requests, sizes)}; prompts {requests.prompt.mean():,.0f} tokens on average (p99 "
        f"{float(sorted(requests.prompt)[int(len(requests) * 0.99)]):,.0f}), answers {requests.answer.mean():,.0f}\n",
        highlight=False,
    )
    console.print(_workers(sizes, need, cluster))
    console.print()
    console.print(_held(found))
    console.print()
    console.print(_delays(found))
    console.print(f"({LEGEND})", highlight=False)
    if found[0].refused:
        console.print(f"\n{found[0].refused:,} requests are larger than a pool and were refused", highlight=False)
    console.print("\nabort rate x hold time x pages per request:", highlight=False)
    for row in found:
        if row.check is not None:
            console.print(f"  {row.name}: {row.check.text()}", highlight=False)


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _workers(sizes: Sizes, need: list[Need], cluster: Cluster) -> Table:
    table = _table("role", "needed when full", "by", f"at {cluster.target:.0%}", "here", "used")
    for role, here in (("prefill", sizes.prefills), ("decode", sizes.decodes)):
        most = binding(need, role)
        wanted = most.workers / cluster.target
        row = (f"{most.workers:,.1f}", most.what, f"{wanted:,.1f}", f"{here:,}", f"{most.workers / here:.0%}")
        table.add_row(role, *row)
    return table


def _held(found: list[Figures]) -> Table:
    table = _table("held pages", "holds", "mean", "p99", "max", "worst", "restarts", "cut")
    for row in found:
        if row.holds:
            table.add_row(
                row.name,
                f"{row.holds:,}",
                f"{row.held_mean:,.0f}",
                f"{row.held_p99:,.0f}",
                f"{row.held_max:,}",
                f"{row.held_worst:.0%}",
                f"{row.restarts:,}",
                f"{row.cut:,}",
            )
    return table


def _delays(found: list[Figures]) -> Table:
    table = _table("seconds", "admission mean", "by holds", "p99", "by holds", "first token p50", "p99")
    without: Figures | None = None
    for row in found:
        if "no holds" in row.name:
            without = row
        assert without is not None
        table.add_row(
            row.name,
            f"{row.delay_mean:.3f}",
            "" if row is without else f"{row.delay_mean - without.delay_mean:+.3f}",
            f"{row.delay_p99:.3f}",
            "" if row is without else f"{row.delay_p99 - without.delay_p99:+.3f}",
            f"{row.first_p50:.2f}",
            f"{row.first_p99:.2f}",
        )
    return table


def everything(courses: list[Course], found: list[Figures], requests: Requests, sizes: Sizes) -> dict[str, Any]:
    """JSON-able. `curve`: rows of (seconds, held, retained, promised pages, waiting requests)."""
    return {
        "requests": len(requests),
        "rate": requests.rate,
        "sizes": asdict(sizes),
        "needs": [asdict(need) for need in needs(requests, sizes)],
        "cases": [{**as_json(row), "curve": course.samples} for row, course in zip(found, courses, strict=True)],
    }
