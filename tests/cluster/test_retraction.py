"""A short pool: answers give their pages back and are computed again; nothing is lost, repeated or stuck."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PAIR = ("prefill-0", "decode-0")
SIZES = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 32, "context_length": 160}


def answers_equal_the_oracle(
    cluster: Cluster, oracle: Callable[..., list[list[int]]], count: int, tokens: int
) -> None:
    draw = random.Random(count)
    prompts = [[draw.randrange(8, 500) for _ in range(draw.randint(10, 90))] for _ in range(count)]
    expected = oracle(prompts, tokens)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    requests = [cluster.start(prompt, sampling, PAIR) for prompt in prompts]
    cluster.until(lambda: all(request.over for request in requests), 90, "the answers")
    assert [request.ends for request in requests if request.outcome != "length"] == []
    assert [request.tokens for request in requests] == expected
    cluster.until(lambda: not not_idle(cluster.inspect("decode-0")), 5, "decode to be idle")


def test_scenario_r34_overload_retracts_and_everyone_finishes_right(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    with Cluster(tiny, run_dir, **SIZES) as cluster:
        cluster.spawn("prefill", "prefill-0", max_total_tokens=2048)
        cluster.spawn("decode", "decode-0", max_total_tokens=400, schedule_conservativeness=0.0)
        cluster.wait_for(*PAIR)
        answers_equal_the_oracle(cluster, oracle, count=32, tokens=60)
        state = cluster.inspect("decode-0")
        assert state["retractions"] >= 10
        assert any(s.name == "quiesce:num_retractions_total" and s.value >= 10 for s in state["samples"])


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_scenario_r62_forced_retraction_leaves_no_gap_and_no_repeat(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]], every: int
) -> None:
    with Cluster(tiny, run_dir, **SIZES) as cluster:
        cluster.spawn("prefill", "prefill-0", max_total_tokens=2048)
        cluster.spawn("decode", "decode-0", Faults(retract_every=every), max_total_tokens=2560)
        cluster.wait_for(*PAIR)
        answers_equal_the_oracle(cluster, oracle, count=16, tokens=24)
        assert cluster.inspect("decode-0")["retractions"] >= 4
