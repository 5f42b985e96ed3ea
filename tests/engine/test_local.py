"""The single-process loop: the answers of transformers, whatever the batching, stopping where it must."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.feeding import prompt_of
from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.local import LocalEngine


def greedy_by_transformers(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_answers_equal_those_of_transformers(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [prompt_of(n, seed=n) for n in (1, 15, 16, 17, 70)]
    wish = Sampling(max_tokens=20, ignore_eos=True)
    answers = LocalEngine(engine).generate(prompts, [wish] * 5, chunk=24, concurrency=3)
    assert answers == [greedy_by_transformers(reference, prompt, 20) for prompt in prompts]


def test_sampled_answers_do_not_depend_on_chunks_or_concurrency(exact_engine: Engine) -> None:
    local = LocalEngine(exact_engine)
    prompts = [prompt_of(5 + 13 * n, seed=n) for n in range(10)]
    wishes = [Sampling(12, temperature=0.9, top_p=0.95, seed=n, ignore_eos=True) for n in range(10)]
    expected = local.generate(prompts, wishes, chunk=512, concurrency=1)
    assert local.generate(prompts, wishes, chunk=7, concurrency=10) == expected
    assert local.generate(prompts, wishes, chunk=64, concurrency=4) == expected
    assert local.generate(prompts[::-1], wishes[::-1], chunk=1, concurrency=3) == expected[::-1]
    assert len({tuple(answer) for answer in expected}) == 10


def test_an_answer_ends_at_a_stop_token_eos_or_the_context_length(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=64, context_length=40)
    local = LocalEngine(engine)
    prompt = prompt_of(30, seed=4)
    (free,) = local.generate([prompt], [Sampling(100, ignore_eos=True)])
    assert len(free) == 11  # the last one is drawn for position 40 and never computed
    stop = free[4]
    first = free.index(stop)
    (stopped,) = local.generate([prompt], [Sampling(100, stop_token_ids=(stop,), ignore_eos=True)])
    assert stopped == free[: first + 1]
    engine.eos_ids = (stop,)
    assert local.generate([prompt], [Sampling(100)]) == [stopped]
    assert local.generate([prompt], [Sampling(3, ignore_eos=True)]) == [free[:3]]


def test_more_requests_than_pages_wait_their_turn(tiny: Path) -> None:
    local = LocalEngine(Engine(tiny, dtype="float32", pool_pages=4))
    prompts = [prompt_of(30, seed=n) for n in range(6)]
    answers = local.generate(prompts, [Sampling(10, ignore_eos=True)] * 6)
    assert [len(answer) for answer in answers] == [10] * 6


def test_a_prompt_that_can_never_fit_is_refused(tiny: Path) -> None:
    local = LocalEngine(Engine(tiny, dtype="float32", pool_pages=2))
    with pytest.raises(EngineError, match="more pages"):
        local.generate([prompt_of(30)], [Sampling(10)])
    with pytest.raises(EngineError, match="empty"):
        local.generate([[]], [Sampling(10)])
    with pytest.raises(EngineError, match="fills the context"):
        local.generate([prompt_of(512)], [Sampling(10)])
