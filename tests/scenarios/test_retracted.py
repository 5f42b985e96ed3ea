"""A decode pool that is short: victims are computed again or end with a clear reason, and need no prefill for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_answered, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZES = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 32, "context_length": 160}
ANSWER = 60


def prompts_of(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(8, 500) for _ in range(draw.randint(10, 90))] for _ in range(count)]


def test_scenario_r79_victims_that_leave_or_run_out_of_time_while_out(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    """No copy of a victim's KV is kept anywhere. Some are cancelled and some time out while they are out; the
    engine goes on and everybody else's answer is right."""
    prompts = prompts_of(24, 79)
    expected = oracle(prompts, ANSWER)
    pair = ("prefill-0", "decode-0")
    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    with Cluster(tiny, run_dir, **SIZES) as cluster:
        cluster.spawn("prefill", pair[0], max_total_tokens=2048)
        cluster.spawn("decode", pair[1], max_total_tokens=320, schedule_conservativeness=0.0)
        cluster.wait_for(*pair)
        requests: list[LabRequest] = []

        def served() -> bool:
            return all(request.over for request in requests)

        def seen() -> bool:
            return cluster.inspect(pair[1])["retracted"] > 0 or served()

        for _ in range(5):  # whoever looks too late finds that all of them have been served
            requests = [cluster.start(prompt, sampling, pair) for prompt in prompts[:16]]
            hurried = [cluster.start(prompt, sampling, pair, deadline=1.5) for prompt in prompts[16:]]
            cluster.until(seen, 60, "a victim")
            if not served():
                break
        assert not served(), "nobody was seen to be out"
        leavers = requests[3::4]
        for request in leavers:  # the youngest are out, the others are not: both kinds leave
            cluster.cancel(request)
        every = requests + hurried
        until_over(cluster, every, 60)
        for request, right in zip(every, expected, strict=True):
            assert [len(ends) for ends in request.ends.values()] == [1, 1]
            assert request.tokens == right[: len(request.tokens)], "no gap, no repeat, also up to an early end"
            if request in hurried and request.outcome != "length":  # in prefill's queue, or while it was answered
                assert 504 in [ends[0].status for ends in request.ends.values()]
            elif request not in leavers:
                assert request.outcome == "length" and len(request.tokens) == ANSWER
        assert cluster.inspect(pair[1])["retractions"] > 0
        for name in pair:
            check_idle(cluster, name)


def test_scenario_r110_resuming_binds_to_nobodys_prefill(tiny: Path, run_dir: Path, oracle: Oracle) -> None:
    """A resumed request has a new transfer id and computes its tokens on the decode engine. So no prefill engine
    computes a prompt twice, and one that has died in between is not missed."""
    prompts = prompts_of(24, 110)
    expected = oracle(prompts, ANSWER)
    prefills, decode = ("prefill-0", "prefill-1"), "decode-0"
    with Cluster(tiny, run_dir, **SIZES) as cluster:
        for name in prefills:
            cluster.spawn("prefill", name, max_total_tokens=2048)
        cluster.spawn("decode", decode, Faults(retract_every=1), max_total_tokens=4096)
        cluster.wait_for(*prefills, decode)
        sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
        requests = [cluster.start(p, sampling, (prefills[n % 2], decode)) for n, p in enumerate(prompts)]
        cluster.until(lambda: all(request.tokens for request in requests), 30, "every hand-over")
        computed = {name: cluster.inspect(name)["prompt_tokens_computed"] for name in prefills}
        assert sum(computed.values()) == sum(map(len, prompts))
        cluster.kill("prefill-1")
        until_answered(cluster, requests, 60)
        assert [request.outcome for request in requests] == ["length"] * len(requests)
        assert [request.tokens for request in requests] == expected
        assert cluster.inspect(decode)["retractions"] >= 50
        assert cluster.inspect(prefills[0])["prompt_tokens_computed"] == computed[prefills[0]]
        for name in (prefills[0], decode):
            check_idle(cluster, name)
