"""NIXL and Mooncake under real workers: the abort storm, and a writer's death that by itself proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.storm import Plan, run
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PAIR = ("prefill-0", "decode-0")
PROMPT = list(range(10, 130))
SIZES = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 16, "context_length": 144}


def events(state: dict[str, Any], name: str) -> float:
    return sum(
        sample.value
        for sample in state["samples"]
        if sample.name == "quiesce:transfer_engine_events_total" and dict(sample.labels)["event"].endswith(name)
    )


@pytest.mark.parametrize("engine", ["nixl/tcp", "nixl/cma", "mooncake/tcp"])
def test_storm_and_death_of_the_writer(
    engine: str, tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    with Cluster(tiny, run_dir, transfer=engine, hold_timeout=3.0, **SIZES) as cluster:
        cluster.spawn("prefill", "prefill-0", Faults(ms_per_page=(0.0, 15.0)), max_total_tokens=2048)
        cluster.spawn("decode", "decode-0", max_total_tokens=288)
        cluster.wait_for(*PAIR)
        report = run(cluster, ("prefill-0",), "decode-0", oracle, Plan(requests=40), seconds=120)
        assert not report.corrupted and not report.failed and report.many_ends == 0
        assert report.survivors > 10
        for name in PAIR:
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 10, f"{name} to be idle")
        decode = cluster.inspect("decode-0")
        assert set(decode["closed_by"]) <= {"completed", "drained", "never_started"}
        assert decode["unsound"] == 0
        assert events(cluster.inspect("prefill-0"), "placed_pages") > 100, "the pages went another way"

        request = cluster.start(PROMPT, Sampling(max_tokens=12, ignore_eos=True), PAIR)
        cluster.until(lambda: "offered" in cluster.inspect("decode-0")["transfers"], 10, "the offer")
        cluster.kill("prefill-0")
        cluster.until(lambda: request.told, 10, "word of the death")
        cluster.until(lambda: not not_idle(cluster.inspect("decode-0")), 10, "the pages to come back")
        decode = cluster.inspect("decode-0")
        assert decode["pages"]["retained"] == 0 and decode["unsound"] == 0
        if engine == "nixl/cma":  # the writer copies by itself: only its death proves anything, and it does
            assert decode["closed_by"]["gone"] == 1
        else:  # bytes may still be under way to the agent that it wrote to, so that one has ended
            assert decode["closed_by"]["fenced"] == 1
            assert events(decode, "agents_ended") >= 1

        cluster.spawn("prefill", "prefill-0", max_total_tokens=2048)
        cluster.wait_for("prefill-0")
        request = cluster.start(PROMPT, Sampling(max_tokens=12, ignore_eos=True), PAIR)
        cluster.until(lambda: request.over, 30, "the next answer")
        assert request.tokens == oracle([PROMPT])[0]
