"""Penalties, bias and forbidden tokens: by the formulas, over the right part of the history, and kept apart."""

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quiesce.core.messages import Sampling
from quiesce.engine.penalties import needs_history, penalised
from quiesce.engine.sampler import sample

HISTORY = [3, 5, 5, 8, 9, 9, 9, 3]  # four of prompt, four of answer
EOS = (1, 2)


def logits_of(vocab: int = 20, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_answer() -> None:
    logits = logits_of()
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([HISTORY]), torch.from_numpy(logits.copy())[None])
    ours = penalised(logits, Sampling(9, repetition_penalty=1.3), HISTORY, 4, EOS)
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)
    assert (ours != logits).sum() == 4


def test_presence_and_frequency_count_the_answer_alone() -> None:
    logits = logits_of()
    expected = logits.copy()
    expected[9] -= 0.5 + 3 * 0.25
    expected[3] -= 0.5 + 1 * 0.25
    wish = Sampling(9, presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(penalised(logits, wish, HISTORY, 4, EOS), expected, rtol=1e-6)
    assert np.array_equal(penalised(logits, wish, HISTORY[:4], 4, EOS), logits)


def test_bias_is_added_after_the_repetition_penalty() -> None:
    logits = np.array([-1.0, 2.0, 4.0], np.float32)
    wish = Sampling(9, repetition_penalty=2.0, logit_bias=((1, 10.0), (2, -100.0)))
    assert penalised(logits, wish, [0, 1, 2], 3, ()).tolist() == [-2.0, 11.0, -98.0]


def test_what_would_end_the_answer_is_forbidden_before_min_tokens_and_never_drawn() -> None:
    logits = np.zeros(20, np.float32)
    logits[[1, 2, 7]] = 50.0
    wish = Sampling(9, temperature=100.0, min_tokens=5, stop_token_ids=(7,), logit_bias=((7, 100.0),))
    drawn = {
        sample(logits, wish, position, history=HISTORY, prompt_tokens=4, eos_ids=EOS).token for position in range(400)
    }
    assert drawn == set(range(20)) - {1, 2, 7}
    one_more = [*HISTORY, 4]
    assert sample(logits, wish, 9, history=one_more, prompt_tokens=4, eos_ids=EOS).token in range(20)
    assert np.isfinite(penalised(logits, wish, one_more, 4, EOS)).all()


def test_an_ignored_eos_is_a_token_like_any_other_before_min_tokens() -> None:
    logits = logits_of()
    out = penalised(logits, Sampling(9, min_tokens=5, ignore_eos=True, stop_token_ids=(7,)), HISTORY, 4, EOS)
    assert np.flatnonzero(out != logits).tolist() == [7]


def test_greedy_follows_the_penalties_and_logprobs_do_not() -> None:
    logits = logits_of()
    best, second = (int(token) for token in np.argsort(-logits)[:2])
    wish = Sampling(9, logit_bias=((best, -100.0),), logprobs=1)
    drawn = sample(logits, wish, 0)
    assert drawn.token == second
    assert drawn.logprob is not None
    assert drawn.logprob.top[0][0] == best
    assert drawn.logprob.logprob == pytest.approx(float(torch.log_softmax(torch.from_numpy(logits), 0)[second]))


def test_the_models_logits_are_left_as_they_are() -> None:
    logits = logits_of()
    before = logits.copy()
    penalised(logits, Sampling(9, repetition_penalty=2.0, logit_bias=((1, 1.0),), min_tokens=50), HISTORY, 4, EOS)
    assert np.array_equal(logits, before)
    assert penalised(logits, Sampling(9), (), 0, EOS) is logits


@pytest.mark.parametrize(
    "wish",
    [
        Sampling(1, repetition_penalty=1.1),
        Sampling(1, presence_penalty=-0.1),
        Sampling(1, frequency_penalty=0.1),
        Sampling(1, min_tokens=1),
    ],
)
def test_settings_that_look_back_say_so(wish: Sampling) -> None:
    assert needs_history(wish)
    assert not needs_history(Sampling(1, temperature=1.0, logit_bias=((1, 1.0),), stop_token_ids=(3,)))
