"""Several samples of one prompt: each its own transfer and its own draw, the prompt computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIR = ("prefill-0", "decode-0")
PROMPT = list(range(20, 175))
SAMPLES = [Sampling(max_tokens=8, temperature=1.0, seed=seed, ignore_eos=True) for seed in (5, 6, 7)]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    engine = Engine(tiny, dtype="float32", page_size=16, pool_pages=64, deterministic=True)
    return [LocalEngine(engine).generate([PROMPT], [sampling])[0] for sampling in SAMPLES]


@pytest.fixture
def pair(tiny: Path, run_dir: Path) -> Iterator[Cluster]:
    with Cluster(
        tiny, run_dir, page_size=16, chunked_prefill_size=32, max_running=8, max_total_tokens=1024
    ) as cluster:
        cluster.spawn("prefill", "prefill-0", Faults(pause=str(run_dir / "pause")))
        cluster.spawn("decode", "decode-0")
        cluster.wait_for(*PAIR)
        yield cluster


def together(pair: Cluster) -> list[LabRequest]:
    """A short prompt is computed before the next request is there, so no step begins until all three are."""
    pause = pair.run_dir / "pause"
    pause.touch()
    requests = [pair.start(PROMPT, sampling, PAIR, group="g") for sampling in SAMPLES]
    pair.until(lambda: pair.inspect("prefill-0")["siblings"] == 2, 30, "two to wait for the first")
    pause.unlink()
    return requests


def computed(cluster: Cluster) -> int:
    samples = cluster.inspect("prefill-0")["samples"]
    return int(sum(s.value for s in samples if s.name == "quiesce:prompt_tokens_computed_total"))


def test_samples_of_one_prompt_compute_it_once_and_draw_their_own(pair: Cluster, expected: list[list[int]]) -> None:
    requests = together(pair)
    pair.until(lambda: all(request.over for request in requests), 30, "the answers")
    assert [request.tokens for request in requests] == expected
    assert computed(pair) == len(PROMPT) + 2, "the other two compute their last token only"
    for name in PAIR:
        pair.until(lambda name=name: not not_idle(pair.inspect(name)), 30, f"{name} to be idle")


def test_the_next_sample_computes_the_prompt_when_the_first_is_cut(pair: Cluster, expected: list[list[int]]) -> None:
    requests = [pair.start(PROMPT, sampling, PAIR, group="g") for sampling in SAMPLES]
    pair.cancel(requests[0])
    pair.until(lambda: all(request.over for request in requests), 30, "the answers")
    assert [request.tokens for request in requests[1:]] == expected[1:]
    for name in PAIR:
        pair.until(lambda name=name: not not_idle(pair.inspect(name)), 30, f"{name} to be idle")
