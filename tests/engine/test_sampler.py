"""The sampler draws from exactly the distribution that was asked for, by seed and position alone."""

import msgspec
import numpy as np
import pytest
import torch

from quiesce.core.messages import Sampling
from quiesce.engine.errors import EngineError
from quiesce.engine.logprobs import token_logprob
from quiesce.engine.sampler import Sampled, check_sampling, sample, uniform

DRAWS = 4000


def logits_of(vocab: int, spread: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def wanted_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """By sorting everything in float64: temperature, then min-p, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))
    p = np.exp(scaled - scaled.max())
    p[p < sampling.min_p] = 0
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=1.0),
        Sampling(1, temperature=0.7, top_p=0.8),
        Sampling(1, temperature=1.5, top_k=7),
        Sampling(1, temperature=1.0, top_k=40, top_p=0.5),
        Sampling(1, temperature=30.0, top_p=0.9),
        Sampling(1, temperature=1.0, min_p=0.1),
        Sampling(1, temperature=2.0, min_p=0.02, top_k=90, top_p=0.8),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Chi-square over cells of at least 20 expected draws; the bound is far beyond the 1e-6 quantile."""
    logits = logits_of(300, 2.0)
    p = wanted_distribution(logits, sampling)
    counts = np.zeros(300)
    for position in range(DRAWS):
        counts[sample(logits, sampling, position).token] += 1
    assert not counts[p == 0].any()
    big = p * DRAWS >= 20
    seen = np.append(counts[big], counts[~big].sum())
    mean = np.append(p[big], p[~big].sum()) * DRAWS
    cells = mean > 0
    chi = float((((seen - mean) ** 2)[cells] / mean[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert chi < freedom + 6 * (2 * freedom) ** 0.5 + 10


@pytest.mark.parametrize("spread", [0.0, 0.2, 1.0, 3.0, 8.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9001, 0), (0.9991, 0), (1.0, 2000), (0.9501, 2000)])
def test_candidates_near_the_best_give_what_sorting_everything_gives(spread: float, top_p: float, top_k: int) -> None:
    """Flat logits force every margin in turn, bf16 rounding makes ties."""
    logits = torch.from_numpy(logits_of(5000, spread)).bfloat16().float().numpy()
    sampling = Sampling(1, temperature=1.0, top_p=top_p, top_k=top_k, seed=9)
    p = wanted_distribution(logits, sampling)
    order = np.lexsort((np.arange(5000), -logits))
    reach = np.cumsum(p[order])
    for position in range(60):
        token = sample(logits, sampling, position).token
        at = int(np.flatnonzero(order == token)[0])
        chance = uniform(9, position)
        assert reach[at] > chance - 1e-5
        assert at == 0 or reach[at - 1] <= chance + 1e-5


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0], np.float32)
    assert sample(logits, Sampling(1), 5).token == 1
    assert sample(logits, Sampling(1, temperature=1e-9, seed=3), 5).token == 1
    assert sample(logits, Sampling(1, temperature=1.0, top_k=1, seed=3), 5).token == 1
    assert sample(logits, Sampling(1, temperature=1.0, top_p=1e-9, seed=3), 5).token == 1


def test_the_uniform_depends_on_seed_and_position_and_is_even() -> None:
    assert uniform(7, 100) == uniform(7, 100)
    values = np.array([[uniform(seed, position) for position in range(500)] for seed in range(40)])
    assert len(np.unique(values)) == values.size
    assert (values >= 0).all()
    assert (values < 1).all()
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 6 * 98**0.5
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.04
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize(
    "wish", [Sampling(1, logprobs=5), Sampling(1, temperature=2.0, top_k=50, seed=4, logprobs=5)]
)
def test_logprobs_are_those_of_the_unmodified_model(wish: Sampling) -> None:
    logits = logits_of(49152, 3.0)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    best = torch.topk(expected, 5)
    drawn = sample(logits, wish, 3)
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(expected[drawn.token]), abs=1e-5)
    assert [token for token, _ in drawn.logprob.top] == best.indices.tolist()
    assert [value for _, value in drawn.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sample(logits, msgspec.structs.replace(wish, logprobs=None), 3) == Sampled(drawn.token)


def test_alternatives_of_equal_logits_are_ordered_by_id_and_bounded_by_the_vocabulary() -> None:
    logits = np.array([1.0, 2.0, 2.0, 0.0, 2.0, -0.0], np.float32)
    assert [token for token, _ in token_logprob(logits, 3, 2).top] == [1, 2]
    assert [token for token, _ in token_logprob(logits, 3, 99).top] == [1, 2, 4, 0, 3, 5]
    assert token_logprob(logits, 3, 0).top == ()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=-1.0),
        Sampling(1, temperature=float("nan")),
        Sampling(1, top_p=0.0),
        Sampling(1, top_p=1.5),
        Sampling(1, top_k=-2),
        Sampling(1, min_p=1.5),
        Sampling(1, min_p=float("nan")),
        Sampling(1, repetition_penalty=0.0),
        Sampling(1, presence_penalty=float("nan")),
        Sampling(1, frequency_penalty=float("inf")),
        Sampling(1, logit_bias=((300, 1.0),)),
        Sampling(1, logit_bias=((-1, 1.0),)),
        Sampling(1, logit_bias=((5, float("nan")),)),
        Sampling(1, stop_token_ids=(300,)),
        Sampling(1, min_tokens=-1),
        Sampling(1, min_tokens=1, stop_token_ids=tuple(range(299))),
        Sampling(1, logprobs=-1),
        Sampling(1, prompt_logprobs=-1),
    ],
)
def test_settings_that_mean_nothing_are_refused(sampling: Sampling) -> None:
    with pytest.raises(EngineError):
        check_sampling(sampling, 300, (299,))
