"""The real model over prefill and decode, token by token: as one process, and as `transformers` where it is sure."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.models.registry import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE, CHUNK = 16, 64
LIMIT = 4 * CHUNK
BOUNDARIES = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, LIMIT)
SURE = 5e-4  # a gap between the two best logits below this may fall either way
WORKERS = ("prefill-0", "decode-0")


@dataclass(frozen=True)
class Size:
    """The longest prompt and its answer fill the context."""

    prompts: int
    answer: int  # tokens

    @property
    def context(self) -> int:
        return LIMIT + self.answer

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.answer, ignore_eos=True)

    def drawn(self) -> list[list[int]]:
        """Every boundary, several times over, of ordinary text tokens."""
        draw = random.Random(20)
        lengths = [BOUNDARIES[i % len(BOUNDARIES)] for i in range(self.prompts)]
        return [[draw.randrange(300, 20_000) for _ in range(length)] for length in lengths]


SMALL = Size(len(BOUNDARIES) + 6, 2 * PAGE)  # more than run at once; every answer begins two pages
FULL = Size(4 * len(BOUNDARIES), 4 * PAGE)
SIZES = [pytest.param(SMALL, id="small"), pytest.param(FULL, id="full", marks=pytest.mark.long)]
Alone = Callable[[Size], list[list[int]]]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve("smollm2", progress=False)


@pytest.fixture(scope="module")
def alone_in_one_process(smollm2: Path) -> Alone:
    """The answers of the single-process engine, computed once for each size."""

    @functools.cache
    def answers(size: Size) -> list[list[int]]:
        engine = Engine(
            smollm2, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True, context_length=size.context
        )
        prompts = size.drawn()
        return LocalEngine(engine).generate(prompts, [size.sampling] * len(prompts), chunk=CHUNK, concurrency=8)

    return answers


@pytest.fixture
def pair(smollm2: Path, run_dir: Path, size: Size) -> Iterator[Cluster]:
    with Cluster(
        smollm2,
        run_dir,
        page_size=PAGE,
        chunked_prefill_size=CHUNK,
        context_length=size.context,
        max_running=16,
        max_total_tokens=16 * size.context,
    ) as cluster:
        cluster.spawn("prefill", "prefill-0")
        cluster.spawn("decode", "decode-0")
        cluster.wait_for(*WORKERS)
        yield cluster


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("concurrency", [1, 16])
def test_pd_equals_the_single_process_engine(
    pair: Cluster, size: Size, alone_in_one_process: Alone, concurrency: int
) -> None:
    prompts, answers = size.drawn(), alone_in_one_process(size)
    if concurrency == 1 and size is SMALL:
        half = slice(1, len(BOUNDARIES), 2)  # both sizes run all of them sixteen at once
        prompts, answers = prompts[half], answers[half]
    requests: list[LabRequest] = []
    for prompt in prompts:
        pair.until(lambda: sum(not r.over for r in requests) < concurrency, 120, "a request to end")
        requests.append(pair.start(prompt, size.sampling, WORKERS, deadline=600))
    pair.until(lambda: all(request.over for request in requests), 300, "the answers")
    for prompt, request, expected in zip(prompts, requests, answers, strict=True):
        assert request.outcome == "length"
        assert request.tokens == expected, f"prompt of {len(prompt)} tokens"
    for name in WORKERS:
        pair.until(lambda name=name: not not_idle(pair.inspect(name)), 30, f"{name} to be idle")


@pytest.mark.parametrize("size", SIZES)
def test_single_process_engine_equals_transformers_where_it_is_sure(
    smollm2: Path, size: Size, alone_in_one_process: Alone
) -> None:
    """Greedy choices of `transformers` over our own answer: the same as generating, up to the first unsure one."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    compared = 0
    for prompt, answer in zip(size.drawn(), alone_in_one_process(size), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for token, expected, (first, second) in zip(answer, logits.argmax(-1).tolist(), best.tolist(), strict=True):
            if first - second < SURE:
                break
            assert token == expected, f"prompt of {len(prompt)} tokens"
            compared += 1
    assert compared > 0.8 * size.prompts * size.answer
