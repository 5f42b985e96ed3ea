"""The real model over prefill and decode, token by token: as one process, and as `transformers` where it is sure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.models.registry import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE, CHUNK, CONTEXT, ANSWER = 16, 64, 320, 64
LIMIT = CONTEXT - ANSWER
BOUNDARIES = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, LIMIT)
PROMPTS = 40
SURE = 5e-4  # a gap between the two best logits below this may fall either way
WORKERS = ("prefill-0", "decode-0")
SAMPLING = Sampling(max_tokens=ANSWER, ignore_eos=True)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve("smollm2", progress=False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Every boundary, several times over, of ordinary text tokens."""
    draw = random.Random(20)
    return [[draw.randrange(300, 20_000) for _ in range(BOUNDARIES[i % len(BOUNDARIES)])] for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def alone_in_one_process(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(
        smollm2, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True, context_length=CONTEXT
    )
    return LocalEngine(engine).generate(prompts, [SAMPLING] * len(prompts), chunk=CHUNK, concurrency=8)


@pytest.fixture
def pair(smollm2: Path, run_dir: Path) -> Iterator[Cluster]:
    with Cluster(
        smollm2,
        run_dir,
        page_size=PAGE,
        chunked_prefill_size=CHUNK,
        context_length=CONTEXT,
        max_running=16,
        max_total_tokens=16 * CONTEXT,
    ) as cluster:
        cluster.spawn("prefill", "prefill-0")
        cluster.spawn("decode", "decode-0")
        cluster.wait_for(*WORKERS)
        yield cluster


@pytest.mark.parametrize("concurrency", [1, 16])
def test_pd_equals_the_single_process_engine(
    pair: Cluster, prompts: list[list[int]], alone_in_one_process: list[list[int]], concurrency: int
) -> None:
    requests = []
    for prompt in prompts:
        pair.until(lambda: sum(not r.over for r in requests) < concurrency, 120, "a request to end")
        requests.append(pair.start(prompt, SAMPLING, WORKERS, deadline=600))
    pair.until(lambda: all(request.over for request in requests), 300, "the answers")
    for prompt, request, expected in zip(prompts, requests, alone_in_one_process, strict=True):
        assert request.outcome == "length"
        assert request.tokens == expected, f"prompt of {len(prompt)} tokens"
    for name in WORKERS:
        pair.until(lambda name=name: not not_idle(pair.inspect(name)), 5, f"{name} to be idle")


def test_single_process_engine_equals_transformers_where_it_is_sure(
    smollm2: Path, prompts: list[list[int]], alone_in_one_process: list[list[int]]
) -> None:
    """Greedy choices of `transformers` over our own answer: the same as generating, up to the first unsure one."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    compared = 0
    for prompt, answer in zip(prompts, alone_in_one_process, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for token, expected, (first, second) in zip(answer, logits.argmax(-1).tolist(), best.tolist(), strict=True):
            if first - second < SURE:
                break
            assert token == expected, f"prompt of {len(prompt)} tokens"
            compared += 1
    assert compared > 0.8 * PROMPTS * ANSWER
