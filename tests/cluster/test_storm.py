"""The abort storm, with the product's rule and with the rule it replaces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.lab.storm import CUTS, Plan, run
from quiesce.lab.storms import PREFILLS, WORDS, storm, storm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("requests", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_storm_survivors_equal_the_oracle_and_every_hold_ends_by_proof(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]], requests: int
) -> None:
    plan = Plan(requests=requests)
    with storm_cluster(tiny, run_dir) as cluster:
        found = storm(cluster, oracle, plan, may_fail=False, seconds=300)
        assert found.wrong == []
        report = found.report
        assert set(report.cuts) == set(CUTS) and min(report.cuts.values()) > requests / 100, report.cuts
        assert report.survivors > plan.requests * 0.4
        decode = cluster.inspect("decode-0")
        # How many cuts fall into a hand-off is the machine's; about a tenth of them where it is idle.
        assert decode["transfers_ended"]["holding"] > requests / 100, decode["transfers_ended"]
        assert set(found.closed["decode"]) <= WORDS, "no fence, nobody's word but the borrower's"
        assert found.released["unsound"] == 0 and found.released["drained"] > requests / 200


def test_storm_with_pages_freed_at_once_corrupts_survivors(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    """The same storm without the rule: if this passed clean, the test above could not fail."""
    with storm_cluster(tiny, run_dir, release="at once") as cluster:
        cluster.wait_for(*PREFILLS, "decode-0")
        for seed in range(1, 6):  # a storm of this size corrupts about five answers; chance may spare one storm
            report = run(cluster, PREFILLS, "decode-0", oracle, Plan(requests=400, seed=seed), seconds=200)
            if report.corrupted:
                return
    pytest.fail("freeing at once should have corrupted somebody")
