"""Pools that hold one prompt with its answer, or two: no order of arrival leaves anybody waiting for ever."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONTEXT, ANSWER = 128, 20
LENGTHS = (10, 50, CONTEXT - ANSWER)
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@pytest.mark.parametrize("fits", [1, 2], ids=["one prompt", "two prompts"])
def test_no_order_of_arrival_deadlocks_in_small_pools(tiny: Path, run_dir: Path, oracle: Oracle, fits: int) -> None:
    """Two by two workers, so that each waits for pages on both sides of two others. decode-0 reserves early,
    decode-1 late, and neither keeps room for what answers still need."""
    prompts = [[8 + (seed * 37 + position * 11) % 480 for position in range(LENGTHS[seed])] for seed in range(3)]
    right = oracle(prompts, ANSWER)
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 16, "context_length": CONTEXT}
    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    with Cluster(tiny, run_dir, max_total_tokens=fits * CONTEXT, **sizes) as cluster:
        for name in PREFILLS:
            cluster.spawn("prefill", name)
        for name, reserve in zip(DECODES, ("early", "late"), strict=True):
            cluster.spawn("decode", name, schedule_conservativeness=0.0, reserve=reserve)
        cluster.wait_for(*PREFILLS, *DECODES)
        pairs = list(itertools.product(PREFILLS, DECODES))
        for turn, order in enumerate(itertools.permutations(range(3))):
            requests = []
            for place, index in enumerate(order):
                for pair in pairs[turn % 4 :] + pairs[: turn % 4]:
                    group = f"{turn}-{place}-{pair}" if index == turn % 3 else ""
                    for _ in range(3 if group else 1):  # one of the prompts is asked for three times over
                        requests.append((index, cluster.start(prompts[index], sampling, pair, group=group)))
            until_over(cluster, [request for _, request in requests], 40)
            assert [request.ends for _, request in requests if request.outcome != "length"] == []
            assert [request.tokens for _, request in requests] == [right[index] for index, _ in requests]
        for name in cluster.workers:
            check_idle(cluster, name)
