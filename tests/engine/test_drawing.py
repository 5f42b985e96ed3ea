"""The native draw gives what sorting everything gives, at every level, and what numpy gives."""

import msgspec
import numpy as np
import pytest
import torch

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.drawing import Drawer
from quiesce.engine.errors import EngineError
from quiesce.engine.native.library import BEST, UNDER, WISH, Library, Peaks, levels, load

TIE = 1e-5  # of the mass: so near to a border rounding may decide
LEVELS = levels()

pytestmark = pytest.mark.skipif(not LEVELS, reason="the native step was not built")

WISHES = [
    Sampling(1, temperature=1.0),
    Sampling(1, temperature=0.7, top_p=0.8),
    Sampling(1, temperature=1.3, top_p=0.9991),
    Sampling(1, temperature=1.5, top_k=7),
    Sampling(1, temperature=1.0, top_k=40, top_p=0.5),
    Sampling(1, temperature=30.0, top_p=0.9),
    Sampling(1, temperature=1.0, min_p=0.1),
    Sampling(1, temperature=2.0, min_p=0.02, top_k=90, top_p=0.8),
    Sampling(1, temperature=0.5, top_k=100_000),
    Sampling(1, temperature=1e-4, top_p=0.5),
]


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


def logits_of(vocab: int, spread: float, seed: int) -> np.ndarray:
    """bfloat16 values: many are equal."""
    drawn = np.random.default_rng(seed).standard_normal(vocab) * spread
    return torch.from_numpy(drawn.astype(np.float32)).bfloat16().float().numpy()


def peaks_of(logits: np.ndarray) -> Peaks:
    blocks = np.stack([b.max(axis=1) for b in np.split(logits, range(UNDER, logits.shape[1], UNDER), axis=1)], axis=1)
    bests = np.zeros(len(logits), BEST)
    bests["token"], bests["value"] = logits.argmax(axis=1), blocks.max(axis=1)
    return Peaks(blocks, bests)


def wish_of(sampling: Sampling, chance: float, masked: bool = False) -> np.ndarray:
    wish = (sampling.temperature, sampling.top_p, sampling.min_p, chance, sampling.top_k, masked, 0)
    return np.array([wish], WISH)


def fits(token: int, logits: np.ndarray, sampling: Sampling, chance: float) -> bool:
    """By sorting all of it in float64: temperature, min-p, top-k, top-p. `chance` falls on the token, and top-p cuts,
    give or take TIE."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))
    p = np.exp(scaled - scaled.max())
    if sampling.min_p:
        floor = np.float32(float(logits.max()) + sampling.temperature * np.log(sampling.min_p))
        p[logits < floor] = 0
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p = p[order] / p.sum()
    at = int(np.flatnonzero(order == token)[0])
    before = np.concatenate(([0.0], np.cumsum(p)[:-1]))
    for near in (-TIE, 0.0, TIE):
        kept = np.where(before >= sampling.top_p + near, 0, p)
        reach = np.cumsum(kept / kept.sum())
        if kept[at] and reach[at] > chance - TIE and (at == 0 or reach[at - 1] <= chance + TIE):
            return True
    return at == 0 and chance > 1 - 1e-9  # what rounding left over


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 300, 5003])
@pytest.mark.parametrize("spread", [0.0, 0.2, 2.0, 8.0])
def test_a_native_draw_is_what_sorting_everything_gives(library: Library, vocab: int, spread: float) -> None:
    random = np.random.default_rng(vocab)
    for number, sampling in enumerate(WISHES):
        logits = logits_of(vocab, spread, number)
        for chance in [0.0, 1 - 2.0**-53, *random.random(8)]:
            wish = wish_of(sampling, chance)
            library.draw(logits[None], wish)
            assert fits(int(wish["token"][0]), logits, sampling, chance), (sampling, chance)


def test_all_levels_and_numpy_draw_alike_from_a_real_vocabulary() -> None:
    wishes = [*WISHES, Sampling(1), Sampling(1, temperature=1e-9)]
    rows = [
        Row([1], position, [0], msgspec.structs.replace(wish, seed=position))
        for position, wish in enumerate(wishes * 4)
    ]
    logits = np.stack([logits_of(49_152, 1.0 + at % 5, at) for at in range(len(rows))])
    drawn = [Drawer(49_152, (2,), load(level)).draw(rows, logits.copy()) for level in LEVELS]
    plain = Drawer(49_152, (2,), None).draw(rows, logits)
    assert all(row == plain for row in drawn)


def test_rows_at_once_and_known_peaks_draw_what_each_row_alone_does(library: Library) -> None:
    """While one row is drawn from, the next one's peaks are read."""
    random = np.random.default_rng(3)
    for vocab in (40, 500, 5003):
        logits = np.stack([logits_of(vocab, 1.0 + at % 4, at) for at in range(3 * len(WISHES))])
        asked = np.concatenate([wish_of(wish, random.random()) for wish in WISHES * 3])
        alone, together, known = asked.copy(), asked.copy(), asked.copy()
        for at in range(len(asked)):
            library.draw(logits[at : at + 1], alone[at : at + 1])
        library.draw(logits, together)
        library.draw(logits, known, peaks_of(logits))
        assert (together["token"] == alone["token"]).all()
        assert (known["token"] == alone["token"]).all()


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie(library: Library) -> None:
    for vocab in (1, 63, 64, 130, 1000):
        for seed in range(5):
            logits = logits_of(vocab, 0.02, seed)
            wish = wish_of(Sampling(1), 0.5)
            library.draw(logits[None], wish)
            assert wish["token"][0] == logits.argmax()


def test_zero_and_minus_zero_are_one_value(library: Library) -> None:
    wish = wish_of(Sampling(1, temperature=1.0, top_k=2), 0.0)
    library.draw(np.array([[-0.0, 0.0, -0.0, -1.0]], np.float32), wish)
    assert wish["token"][0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [Sampling(1), *WISHES[:4]])
def test_a_row_that_is_not_finite_is_told_and_no_other(library: Library, value: float, sampling: Sampling) -> None:
    for vocab in (7, 64, 200):
        for at in (0, vocab // 2, vocab - 1):
            logits = np.stack([logits_of(vocab, 1.0, row) for row in range(3)])
            logits[1, at] = value
            wishes = np.concatenate([wish_of(sampling, 0.3)] * 3)
            library.draw(logits, wishes)
            assert (wishes["token"] >= 0).tolist() == [True, False, True]


@pytest.mark.parametrize("sampling", [Sampling(1), *WISHES])
def test_what_is_masked_is_never_drawn(library: Library, sampling: Sampling) -> None:
    for vocab, allowed in ((9, (8,)), (64, (3, 60)), (500, (0, 333, 499))):
        logits = np.full(vocab, -np.inf, np.float32)
        logits[list(allowed)] = logits_of(len(allowed), 1.0, 1)
        seen = set()
        for chance in np.linspace(0, 1, 40, endpoint=False):
            wish = wish_of(sampling, chance, masked=True)
            library.draw(logits[None], wish)
            seen.add(int(wish["token"][0]))
        assert seen <= set(allowed)
        assert seen == set(allowed) or sampling.temperature < 1 or sampling.top_p < 1 or sampling.min_p


def test_penalties_bias_and_log_probabilities_are_those_of_numpy() -> None:
    vocab, history = 300, [5, 9, 9, 100, 7]
    wishes = [
        Sampling(1, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25, logprobs=3),
        Sampling(1, temperature=0.9, top_p=0.9, repetition_penalty=1.4, logprobs=0),
        Sampling(1, temperature=0.9, logit_bias=((17, 30.0), (18, -30.0))),
        Sampling(1, temperature=2.0, min_tokens=10, stop_token_ids=(4,)),
        Sampling(1, temperature=1.0, top_k=3, logprobs=5),
    ]
    rows = [
        Row([history[-1]], 4, [0], msgspec.structs.replace(wish, seed=seed), history, prompt_tokens=2)
        for wish in wishes
        for seed in range(6)
    ]
    logits = np.stack([logits_of(vocab, 2.0, at) for at in range(len(rows))])
    plain = Drawer(vocab, (2,), None).draw(rows, logits)
    assert Drawer(vocab, (2,), load(LEVELS[0])).draw(rows, logits) == plain


def test_a_wish_that_means_nothing_is_refused_each_time() -> None:
    drawer, wrong = Drawer(300, (2,), None), Sampling(1, top_p=0.0)
    for _ in range(2):
        with pytest.raises(EngineError, match="top_p"):
            drawer.kind(wrong)
