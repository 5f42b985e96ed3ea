"""A step over seats gives what the same rows give alone, on every native level and in plain PyTorch."""

import random
from pathlib import Path

import numpy as np
import pytest

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError, NonFiniteLogits
from quiesce.engine.native.library import UNDER, levels, load
from quiesce.engine.sampler import uniform
from quiesce.engine.seats import Seats, can_sit
from tiny_model import make_tiny_llama

VOCAB = 300
WISHES = [
    Sampling(9),
    Sampling(9, temperature=0.9, seed=5, top_p=0.8),
    Sampling(9, temperature=1.2, seed=-3),
    Sampling(9, temperature=0.7, seed=2**63, top_k=5),
    Sampling(9, temperature=1.0, min_p=0.2),
]


@pytest.fixture(params=[*levels(), "off"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    folder = make_tiny_llama(tmp_path, vocab=VOCAB)
    return Engine(folder, dtype="float32", page_size=4, pool_pages=200, native_level=request.param)


def test_a_step_over_seats_draws_what_rows_of_their_own_draw(engine: Engine) -> None:
    """Requests come, go and grow in random order; some are rows, and prompts are among them."""
    draw = random.Random(3)
    seats, known, pages, wishes = Seats(6, 4), list[list[int]](), list[list[int]](), list[Sampling]()
    free = list(range(200))
    draw.shuffle(free)
    for turn in range(30):
        while len(seats) < 6 and draw.random() < 0.6:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 30))]
            mine = [free.pop() for _ in range(-(-len(prompt) // 4))]
            engine.run([Row(prompt[:-1], 0, mine)])
            wish = WISHES[draw.randrange(len(WISHES))]
            assert seats.take(prompt, len(prompt), wish, mine) == len(known)
            known.append(prompt), pages.append(mine), wishes.append(wish)
        for seat in seats.short():
            pages[seat].append(free.pop())
            seats.add_pages(seat, pages[seat][-1:])
        if not len(seats):
            continue
        rows = [Row([7] * 9, 0, free[:3], Sampling(1))] if turn % 2 else []
        alone = [
            Row([tokens[-1]], len(tokens) - 1, table, wish)
            for tokens, table, wish in zip(known, pages, wishes, strict=True)
        ]
        assert [(r.tokens, r.start, r.pages, r.history) for r in seats.rows()] == [
            (r.tokens, r.start, r.pages, k) for r, k in zip(alone, known, strict=True)
        ]
        want = [engine.step([row])[0] for row in alone]
        tokens, results = engine.run_seated(seats, rows)
        assert tokens.tolist() == want
        assert results == engine.run(rows)
        seats.advance(tokens)
        for mine, token in zip(known, tokens.tolist(), strict=True):
            mine.append(token)
        if draw.random() < 0.4:
            seat = draw.randrange(len(seats))
            free += pages[seat]
            moved = seats.leave(seat)
            for kept in (known, pages, wishes):
                last = kept.pop()
                if moved is not None:
                    kept[seat] = last


def test_seats_that_would_touch_each_other_s_pages_are_refused(engine: Engine) -> None:
    seats = Seats(2, 4)
    seats.take([1, 2], 2, Sampling(2), [5])
    seats.take([1, 2], 2, Sampling(2), [5])
    with pytest.raises(EngineError):
        engine.run_seated(seats, [])
    seats.leave(1)
    with pytest.raises(EngineError):
        engine.run_seated(seats, [Row([1], 0, [5])])
    seats.take([1] * 6, 6, Sampling(2), [6])  # its sixth token has no page
    with pytest.raises(EngineError):
        engine.run_seated(seats, [])
    seats.leave(1)
    seats.take([1], 1, Sampling(2), [200])
    with pytest.raises(EngineError):
        engine.run_seated(seats, [])


def test_a_seat_that_is_not_finite_is_named(engine: Engine) -> None:
    seats = Seats(3, 4)
    engine.kv.tensor.fill_(0)
    for page in (1, 2, 3):
        seats.take([4, 5], 2, Sampling(2), [page])
    engine.kv.tensor[2] = float("nan")
    with pytest.raises(NonFiniteLogits, match="1"):
        engine.run_seated(seats, [])


def test_who_wants_more_than_a_token_does_not_sit() -> None:
    assert all(can_sit(wish) for wish in WISHES)
    for more in ({"logprobs": 0}, {"min_tokens": 1}, {"logit_bias": ((1, 1.0),)}, {"presence_penalty": 1.0}):
        assert not can_sit(Sampling(9, **more))


@pytest.mark.parametrize("level", levels())
def test_native_chances_are_those_of_the_sampler(level: str) -> None:
    random = np.random.default_rng(1)
    seeds = random.integers(0, 2**64, 200, dtype=np.uint64)
    positions = random.integers(0, 2**40, 200)
    want = [uniform(int(seed), int(position)) for seed, position in zip(seeds, positions, strict=True)]
    assert load(level).chances(seeds, positions).tolist() == want


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("threads", [1, 2])
def test_peaks_are_the_largest_of_each_block_and_the_best_is_the_first_of_the_largest(
    level: str, threads: int, tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path, vocab=VOCAB)
    engine = Engine(folder, dtype="float32", pool_pages=8, native_level=level, threads=threads)
    model = engine._model
    hidden = model.forward(model.plan([Row(list(range(4, 104)), 0, list(range(7)))], engine.kv), engine.kv)
    hidden[3] = 0  # all of its logits are 0: a tie
    hidden[50] = float("nan")
    lines, peaks = model.logits_and_peaks(hidden)  # type: ignore[union-attr]
    blocks = np.split(lines.numpy(), range(UNDER, VOCAB, UNDER), axis=1)
    want = np.stack([block.max(axis=1) for block in blocks], axis=1)
    assert np.array_equal(peaks.blocks, want, equal_nan=True) and np.isnan(peaks.blocks[50]).all()
    assert np.array_equal(peaks.bests["value"], want.max(axis=1), equal_nan=True)
    sound = np.arange(100) != 50
    assert np.array_equal(peaks.bests["token"][sound], lines.numpy().argmax(axis=1)[sound])
