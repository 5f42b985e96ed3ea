"""The abort storm on any engine, in either direction: two prefills of which one is slow, and one decode.

What a storm must show is the same everywhere; what may prove that pages are free is not, so ends are counted by kind.
With `lose`, outcomes of posts are lost as well: their transfers are tainted, and only a drain or a fence that hits
others of the same peer brings their pages back. Those others may fail, with a reason; no answer may be wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quiesce.lab.cells import Direction, lane_of
from quiesce.lab.cluster import Cluster, LabRequest, Oracle
from quiesce.lab.idle import not_idle
from quiesce.lab.storm import Plan, Report, run
from quiesce.lab.worker import Faults

PREFILLS, DECODE = ("prefill-0", "prefill-1"), "decode-0"
HOLD = 5.0  # seconds of --hold-timeout
IDLE = HOLD + 30.0  # seconds until all must be idle again, on a machine that does something else too
PACES = ((3.0, 20.0), (0.0, 0.5))  # ms a page, of either donor
SIZES: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 16, "context_length": 144}
POOL_OF_TWO_PROMPTS = 288  # tokens; the longest prompt with its answer needs 144
WORDS = {"completed", "drained", "never_started"}  # what the borrower itself may say


def storm_cluster(
    model: Path,
    run_dir: Path,
    *,
    transfer: str = "shm",
    direction: Direction = "push",
    release: Literal["proof", "at once"] = "proof",
    lose: float = 0.0,
    log: Path | None = None,
) -> Cluster:
    """Started, not yet serving. `lose`: share of the posts whose outcome is lost."""
    # Nobody would start a worker again that leaves because too much is retained.
    common = {**SIZES, "transfer": transfer, "direction": direction, "hold_timeout": HOLD, "max_retained": 1.0}
    cluster = Cluster(model, run_dir, log, **common)
    # One donor's writes crawl, the other's do not: nothing serialises them, so a late one can land in a page that
    # the other donor's request has long filled and is being decoded from.
    for number, (name, pace) in enumerate(zip(PREFILLS, PACES, strict=True)):
        faults = Faults(seed=number, ms_per_page=pace, unknown=lose) if direction == "push" else Faults()
        tokens = 2048 if direction == "push" else POOL_OF_TWO_PROMPTS
        cluster.spawn("prefill", name, faults, max_total_tokens=tokens)
    faults = Faults(seed=1, ms_per_page=(2.0, 12.0), unknown=lose) if direction == "pull" else Faults(release=release)
    cluster.spawn("decode", DECODE, faults, max_total_tokens=POOL_OF_TWO_PROMPTS)
    return cluster


@dataclass
class Found:
    """A storm's report, how leases and holds ended, and what must not be."""

    report: Report
    closed: dict[str, Counter[str]]  # by role, proofs of leases
    released: Counter[str]  # of transfers that were given up, by what freed their pages
    rebuilt: int  # agents that were ended to take a peer's access away
    wrong: list[str]

    def line(self) -> str:
        """For people: one line of figures."""
        report, cuts = self.report, sum(self.report.cuts.values())
        ends = ", ".join(f"{self.released[name]} {name}" for name in sorted(self.released) if self.released[name])
        return (
            f"{report.survivors} answered, {cuts} cut, {len(report.failed)} failed, {len(report.corrupted)} wrong, "
            f"{report.seconds:.0f} s; given up and freed: {ends or 'none'}; agents rebuilt: {self.rebuilt}"
        )


def storm(cluster: Cluster, oracle: Oracle, plan: Plan, *, may_fail: bool, seconds: float = 600.0) -> Found:
    """Waits for the workers of any cluster with one decode, warms them up, and storms. `may_fail`: failures with a
    reason are no fault. Raises TimeoutError when something does not end."""
    prefills = [worker.name for worker in cluster.workers.values() if worker.role == "prefill"]
    cluster.wait_for(*cluster.workers)
    warm = run(cluster, prefills, DECODE, oracle, Plan(requests=4, cut_share=0.0))
    lane = lane_of(cluster)
    boot = {name: lane.allowed(cluster.inspect(name)) for name in cluster.workers}
    report = run(cluster, prefills, DECODE, oracle, plan, seconds=seconds)
    wrong = _wrong(report, may_fail) + [f"warm-up: {line}" for line in _wrong(warm, may_fail)]
    closed: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
    released: Counter[str] = Counter()
    rebuilt = 0
    for name in cluster.workers:
        # threads and descriptors of attachments that were made anew are not compared
        wrong += _not_idle_soon(cluster, name, None if may_fail else boot[name])
        state = cluster.inspect(name)
        wrong += _ledger_faults(name, state)
        closed[state["role"]].update(state["closed_by"])
        released.update(samples(state, "quiesce:decode_deferred_kv_release_total", "outcome"))
        rebuilt += _ended_agents(state)
    return Found(report, closed, released, rebuilt, wrong)


def _wrong(report: Report, may_fail: bool) -> list[str]:
    lines = []
    if report.corrupted:
        lines.append(f"{len(report.corrupted)} answers differ from the oracle's")
    if report.many_ends:
        lines.append(f"{report.many_ends} requests had not one last word for each leg")
    silent = [request for request in report.failed if not may_fail or not all(_reasons(request))]
    lines += [f"failed: {_reasons(request)}" for request in silent[:3]]
    return lines


def _reasons(request: LabRequest) -> list[str]:
    return [ended.reason for ends in request.ends.values() for ended in ends if ended.outcome != "handed_over"]


def _not_idle_soon(cluster: Cluster, name: str, boot: dict[str, Any] | None) -> list[str]:
    try:
        cluster.until(lambda: not not_idle(cluster.inspect(name), boot), IDLE, f"{name} to be idle")
    except TimeoutError:
        return [f"{name} is not idle: {line}" for line in not_idle(cluster.inspect(name), boot)]
    return []


def _ledger_faults(name: str, state: dict[str, Any]) -> list[str]:
    closed = sum(state["closed_by"].values()) + state["step_leases"]
    lines = []
    if state["leases_opened"] != closed:
        lines.append(f"{name}: {state['leases_opened']} leases were opened, {closed} closed")
    if state["unsound"]:
        lines.append(f"{name}: {state['unsound']} ends were unsound")
    return lines


def samples(state: dict[str, Any], metric: str, label: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in state["samples"]:
        if sample.name == metric:
            found[dict(sample.labels)[label]] += int(sample.value)
    return found


def _ended_agents(state: dict[str, Any]) -> int:
    return events(state, "agents_rebuilt")


def events(state: dict[str, Any], name: str) -> int:
    """What the engines of a worker have counted under this name."""
    found = samples(state, "quiesce:transfer_engine_events_total", "event")
    return sum(count for event, count in found.items() if event.endswith(name))
