"""Rows: what a step takes, refuses and repeats, and from which thread."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.feeding import GREEDY, prompt_of, scattered_pages
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError, NonFiniteLogits

PENALISED = Sampling(9, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Row([], 0, [0], GREEDY)], "nothing to compute"),
        ([Row([5], -1, [0], GREEDY)], "before 0"),
        ([Row([512], 0, [0], GREEDY)], r"outside 0\.\.511"),
        ([Row([-1], 0, [0], GREEDY)], r"outside 0\.\.511"),
        ([Row([5] * 17, 0, [0], GREEDY)], "1 pages, but 2"),
        ([Row([5], 512, list(range(40)), GREEDY)], "context length of 512"),
        ([Row([5], 0, [128], GREEDY)], r"page outside 0\.\.127"),
        ([Row([5], 0, [-1], GREEDY)], r"page outside 0\.\.127"),
        ([Row([5], 0, [3], GREEDY), Row([6], 0, [3], GREEDY)], "both write page 3"),
        ([Row([5], 0, [3], Sampling(1, top_p=7.0))], "top_p"),
        ([Row([5], 0, [3], PENALISED)], "0 tokens are the prompt"),
        ([Row([5], 0, [3], PENALISED, history=[5], prompt_tokens=2)], "2 tokens are the prompt"),
        ([Row([5], 1, [3], PENALISED, history=[5], prompt_tokens=1)], "history of 1 tokens, but 2"),
        ([Row([5], 0, [3], PENALISED, history=[6], prompt_tokens=1)], "not its own"),
        ([Row([5], 0, [3], history=[5], prompt_tokens=2, prompt_logprobs=0)], "history of 1 tokens, but 2"),
        ([Row([5], 0, [3], history=[5, 512], prompt_tokens=2, prompt_logprobs=0)], r"prompt token outside 0\.\.511"),
        ([Row([5], 0, [3], Sampling(1, logit_bias=((512, 1.0),)))], "logit_bias of token 512"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_before_anything_is_written(
    engine: Engine, rows: list[Row], words: str
) -> None:
    before = engine.kv.tensor.clone()
    with pytest.raises(EngineError, match=words):
        engine.step(rows)
    assert torch.equal(engine.kv.tensor, before)


def test_a_prefix_may_be_shared_but_only_read(engine: Engine) -> None:
    prompt = prompt_of(32, seed=1)
    engine.step([Row(prompt, 0, [10, 11])])
    rows = [Row([5], 32, [10, 11, 12], GREEDY), Row([6], 32, [10, 11, 13], GREEDY)]
    together = engine.step(rows)
    assert together == [engine.step([row])[0] for row in rows]


def test_no_rows_is_no_work(engine: Engine) -> None:
    assert engine.step([]) == []


def test_a_step_runs_in_another_thread_and_repeats_itself(engine: Engine) -> None:
    prompt = prompt_of(40)
    row = Row(prompt, 0, scattered_pages(engine, 40), Sampling(1, temperature=1.0, seed=5, logprobs=3))
    here = engine.run([row])
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(engine.run, [row]).result()
    assert here == there
    assert here[0].sampled is not None
    assert here[0].sampled.logprob is not None
    assert here[0].sampled.logprob.logprob < 0
    assert len(here[0].sampled.logprob.top) == 3


def test_non_finite_logits_name_their_rows_and_the_rest_can_be_repeated(engine: Engine) -> None:
    prompt = prompt_of(20, seed=3)
    engine.step([Row(prompt, 0, [1, 2]), Row(prompt, 0, [3, 4])])
    rows = [Row([7], 20, [1, 2], GREEDY), Row([7], 20, [3, 4], GREEDY)]
    good = engine.step(rows)
    engine.kv.tensor[3] = float("nan")
    try:
        with pytest.raises(NonFiniteLogits, match=r"rows \[1\]") as error:
            engine.step(rows)
        assert error.value.rows == (1,)
        assert engine.step(rows[:1]) == good[:1]
    finally:
        engine.kv.tensor.zero_()


def test_the_next_token_is_drawn_for_its_own_position(engine: Engine) -> None:
    """Two prompts with equal logits at different positions draw from different randomness."""
    wish = Sampling(1, temperature=50.0, seed=1)
    drawn = {engine.step([Row([9] * n, 0, scattered_pages(engine, n), wish)])[0] for n in range(1, 12)}
    assert len(drawn) > 5


def test_the_context_can_be_shortened_but_not_stretched(tiny: Path) -> None:
    short = Engine(tiny, dtype="float32", pool_pages=8, context_length=40)
    assert short.context_length == 40
    with pytest.raises(EngineError, match="context length of 40"):
        short.step([Row([5] * 41, 0, [0, 1, 2], GREEDY)])
    with pytest.raises(EngineError, match="513"):
        Engine(tiny, dtype="float32", pool_pages=8, context_length=513)


def test_the_arena_holds_what_another_engine_needs_to_go_on(tiny: Path) -> None:
    """Hand-off in one process: pages copied as bytes into other places of a second engine's arena."""
    prefill = Engine(tiny, dtype="float32", pool_pages=8)
    decode = Engine(tiny, dtype="float32", pool_pages=8)
    assert prefill.fingerprint.difference(decode.fingerprint) is None
    prompt = prompt_of(40, seed=9)
    (first,) = prefill.step([Row(prompt, 0, [5, 1, 6], GREEDY)])
    assert first is not None
    decode.kv.arena.pages[[0, 7, 3]] = prefill.kv.arena.pages[[5, 1, 6]]
    _, here = prefill.logits([Row([first], 40, [5, 1, 6], GREEDY)])
    _, there = decode.logits([Row([first], 40, [0, 7, 3], GREEDY)])
    assert np.array_equal(here, there)


def test_a_warm_up_leaves_the_pool_as_it_was(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=8)
    engine.warm_up()
    assert not engine.kv.tensor.any()
    Engine(tiny, dtype="float32", page_size=1, pool_pages=1).warm_up()


@pytest.mark.parametrize("deterministic", [False, True])
def test_pages_copied_within_the_pool_go_on_as_the_originals_do(tiny: Path, deterministic: bool) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=8, deterministic=deterministic)
    engine.step([Row(prompt_of(40, seed=2), 0, [5, 1, 6])])
    engine.kv.copy([5, 1, 6], [0, 7, 3])
    _, lines = engine.logits([Row([9], 40, [5, 1, 6], GREEDY), Row([9], 40, [0, 7, 3], GREEDY)])
    assert np.array_equal(lines[0], lines[1])
