"""The abort storm over pull: two sources of which one is read slowly, one reader, half of the requests cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.storm import CUTS, Plan, run
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZES = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 16, "context_length": 144}
POOL_OF_TWO_PROMPTS = 288  # tokens, on either side
PREFILLS = ("prefill-0", "prefill-1")


def test_storm_over_pull_survivors_equal_the_oracle_and_every_lease_ends_by_the_readers_word(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    plan = Plan(requests=200, in_flight=4)
    with Cluster(tiny, run_dir, direction="pull", max_total_tokens=POOL_OF_TWO_PROMPTS, **SIZES) as cluster:
        for name in PREFILLS:
            cluster.spawn("prefill", name)
        cluster.spawn("decode", "decode-0", Faults(seed=1, ms_per_page=(2.0, 12.0)))
        cluster.wait_for(*PREFILLS, "decode-0")
        run(cluster, PREFILLS, "decode-0", oracle, Plan(requests=4, cut_share=0.0))
        boot = {name: cluster.inspect(name) for name in cluster.workers}
        report = run(cluster, PREFILLS, "decode-0", oracle, plan, seconds=120)

        assert not report.corrupted, f"{len(report.corrupted)} answers differ from the oracle"
        assert not report.failed, [request.ends for request in report.failed[:3]]
        assert report.many_ends == 0 and report.survivors > plan.requests * 0.4
        assert set(report.cuts) == set(CUTS), report.cuts
        for name in cluster.workers:
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name), boot[name]), 30, f"{name} to be idle")
        drained = {"prefill": 0, "decode": 0}
        for name in cluster.workers:
            state = cluster.inspect(name)
            closed = state["closed_by"]
            assert state["leases_opened"] == sum(closed.values()) + state["step_leases"], "each lease has one proof"
            assert set(closed) <= {"completed", "drained"}, "no fence: the reader's own word"
            drained[state["role"]] += closed.get("drained", 0)
        assert min(drained.values()) > 1, f"cut while it was lent: {drained}"
