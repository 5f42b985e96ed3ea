"""Sampling that looks back: the same text alone, in company, in any chunks, and begun on another engine."""

from pathlib import Path

import pytest

from engine.feeding import prompt_of
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine

WISHES = [
    Sampling(24, temperature=0.9, seed=1, repetition_penalty=1.3, ignore_eos=True),
    Sampling(24, temperature=1.2, top_k=40, seed=2, presence_penalty=1.5, frequency_penalty=0.7, ignore_eos=True),
    Sampling(24, temperature=1.0, min_p=0.05, seed=3, logit_bias=((17, 4.0), (18, -100.0)), min_tokens=20),
    Sampling(24, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=24, stop_token_ids=tuple(range(4, 300))),
    Sampling(24, temperature=0.8, top_p=0.9, seed=4, logprobs=2, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def other(tiny: Path) -> Engine:
    """What the first token is drawn on."""
    return Engine(tiny, dtype="float32", page_size=16, pool_pages=64, deterministic=True)


def test_company_and_chunks_change_nothing(exact_engine: Engine) -> None:
    local = LocalEngine(exact_engine)
    prompts = [prompt_of(11 + 17 * n, seed=n) for n in range(5)]
    alone = [local.complete([prompt], [wish])[0] for prompt, wish in zip(prompts, WISHES, strict=True)]
    assert local.complete(prompts, WISHES, chunk=9, concurrency=5) == alone
    plain = [Sampling(24, ignore_eos=True)] * 5
    assert all(answer.tokens != other for answer, other in zip(alone, local.generate(prompts, plain), strict=True))
    assert len(alone[3].tokens) == 24
    assert not set(alone[3].tokens[:23]) & set(range(4, 300))
    assert 18 not in alone[2].tokens
    assert len(alone[2].tokens) >= 20


@pytest.mark.parametrize("number", range(5))
def test_the_first_token_drawn_elsewhere_gives_the_same_text(
    exact_engine: Engine, other: Engine, number: int
) -> None:
    """Prompt and first token on one engine, the pages copied, the rest on another; history is all that goes along."""
    prompt, wish = prompt_of(50, seed=number), WISHES[number]
    (expected,) = LocalEngine(exact_engine).complete([prompt], [wish])
    tokens, theirs, ours = list(prompt), [9, 2, 5, 7, 1], [30, 11, 12, 13, 14]
    (first,) = other.run([Row(prompt, 0, theirs, wish, history=tokens, prompt_tokens=50)])
    assert first.sampled is not None
    drawn = [first.sampled]
    exact_engine.kv.arena.pages[ours] = other.kv.arena.pages[theirs]
    while len(drawn) < len(expected.tokens):
        tokens.append(drawn[-1].token)
        row = Row(tokens[-1:], len(tokens) - 1, ours, wish, history=tokens, prompt_tokens=50)
        (result,) = exact_engine.run([row])
        assert result.sampled is not None
        drawn.append(result.sampled)
    assert [one.token for one in drawn] == expected.tokens
    assert [one.logprob for one in drawn if one.logprob] == expected.logprobs


def test_a_history_that_runs_ahead_of_its_row_is_read_up_to_the_row(exact_engine: Engine) -> None:
    """Recomputing after a retraction: what was already answered must not penalise an earlier draw."""
    prompt, wish = prompt_of(30, seed=8), Sampling(9, temperature=1.0, seed=5, repetition_penalty=1.5)
    (plain,) = exact_engine.run([Row(prompt, 0, [0, 1], wish, history=prompt, prompt_tokens=30)])
    ahead = [*prompt, *range(4, 400)]
    (again,) = exact_engine.run([Row(prompt, 0, [0, 1], wish, history=ahead, prompt_tokens=30)])
    assert plain == again
