"""A short pool: answers give their pages back and are computed again; nothing is lost, repeated or stuck."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher

from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

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
    cluster.until(lambda: not not_idle(cluster.inspect("decode-0")), 30, "decode to be idle")


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


def test_scenario_r103_a_retracted_answer_goes_on_where_it_was_in_its_grammar(tiny: Path, run_dir: Path) -> None:
    grammar = LLMatcher.grammar_from_regex(r"([a-f]{2}-){6}[0-9]{4}")
    wishes = [Sampling(max_tokens=40, temperature=1.0, seed=n, grammar=grammar) for n in range(12)]
    prompts = [[8 + n, 9, 10, 11] for n in range(len(wishes))]
    local = LocalEngine(Engine(tiny, dtype="float32", page_size=16, pool_pages=256, deterministic=True))
    expected = local.generate(prompts, wishes, chunk=64, concurrency=4)
    with Cluster(tiny, run_dir, **SIZES) as cluster:
        cluster.spawn("prefill", "prefill-0", max_total_tokens=2048)
        cluster.spawn("decode", "decode-0", Faults(retract_every=3), max_total_tokens=2560)
        cluster.wait_for(*PAIR)
        requests = [cluster.start(prompt, wish, PAIR) for prompt, wish in zip(prompts, wishes, strict=True)]
        cluster.until(lambda: all(request.over for request in requests), 60, "the answers")
        assert [request.tokens for request in requests] == expected
        assert [request.outcome for request in requests] == ["stop"] * len(requests)
        assert cluster.inspect("decode-0")["retractions"] >= 4
        bad = cluster.start([8, 9], Sampling(max_tokens=4, grammar="start: /(/"), PAIR)
        cluster.until(lambda: bad.over, 30, "the refusal")
        assert {ended.status for ends in bad.ends.values() for ended in ends} <= {400, 499, 502}
        cluster.until(lambda: not not_idle(cluster.inspect("decode-0")), 30, "decode to be idle")
        cluster.until(lambda: not not_idle(cluster.inspect("prefill-0")), 30, "prefill to be idle")
