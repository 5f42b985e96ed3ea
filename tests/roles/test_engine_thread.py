"""The engine's thread gives what the engine gives, whether Python or its loop makes the step, and says who failed."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError, NonFiniteLogits
from quiesce.engine.native.library import levels
from quiesce.engine.seats import Seats
from quiesce.roles.engine_thread import EngineThread, StepEnd
from tiny_model import make_tiny_llama

LONG_MS = 30_000
WISHES = [Sampling(9), Sampling(9, temperature=0.9, seed=5, top_p=0.8), Sampling(9, temperature=0.7, seed=9, top_k=5)]


@pytest.fixture(params=[*levels(), "off"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    folder = make_tiny_llama(tmp_path, vocab=300)
    return Engine(folder, dtype="float32", page_size=4, pool_pages=200, native_level=request.param)


@pytest.fixture
def thread(engine: Engine) -> Iterator[EngineThread]:
    made = EngineThread(engine)
    yield made
    made.stop()


def ended(thread: EngineThread) -> StepEnd:
    assert select.select([thread], [], [], LONG_MS / 1000)[0], "no step has ended"
    end = thread.take()
    assert end is not None and not thread.busy and thread.take() is None
    return end


def seated(count: int, most: int = 40) -> Seats:
    seats = Seats(most, 4)
    for number in range(count):
        pages = [3 * number, 3 * number + 1, 3 * number + 2]
        seats.take([number + 1, 7, 9], 3, WISHES[number % len(WISHES)], pages)
    return seats


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sat at each step that Python made."""
    steps, inner = list[int](), engine.run_seated

    def run_seated(seats: Seats, rows: Any) -> Any:
        steps.append(len(seats))
        return inner(seats, rows)

    monkeypatch.setattr(engine, "run_seated", run_seated)
    return steps


def test_steps_of_seats_alone_are_the_engine_s_and_go_past_python(
    engine: Engine, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.kv.tensor.zero_()
    seats, row = seated(3), Row([5, 6, 7], 0, [190], Sampling(1))
    for turn in range(9):
        if turn == 4:  # more sit than the loop has had places for
            for number in range(3, 37):
                pages = [3 * number, 3 * number + 1, 3 * number + 2]
                seats.take([number + 1, 7, 9], 3, WISHES[number % len(WISHES)], pages)
        want, others = engine.run_seated(seats, [row])
        rows = [row] if turn % 3 == 2 else []
        with monkeypatch.context() as patch:
            by_python = counted(engine, patch)
            thread.submit(rows, seats)
            end = ended(thread)
        assert end.tokens is not None and end.tokens.tolist() == want.tolist()
        assert end.results == (others if rows else []) and not end.errors and not end.seat_errors
        assert by_python == ([] if engine.native and not rows else [len(seats)])
        seats.advance(end.tokens)
    assert thread.steps == 9


def test_who_is_not_finite_fails_alone_and_the_next_step_goes_on(engine: Engine, thread: EngineThread) -> None:
    engine.kv.tensor.zero_()
    engine.kv.tensor[3] = float("nan")
    seats = seated(3)
    for _ in range(2):
        thread.submit([], seats)
        end = ended(thread)
        assert list(end.seat_errors) == [1] and isinstance(end.seat_errors[1], NonFiniteLogits)
        assert end.tokens is not None
        alone = [engine.step([row])[0] for at, row in enumerate(seats.rows()) if at != 1]
        assert end.tokens[[0, 2]].tolist() == alone
    engine.kv.tensor[3] = 0
    thread.submit([], seats)
    end = ended(thread)
    assert not end.seat_errors and end.tokens is not None
    assert end.tokens.tolist() == engine.run_seated(seats, [])[0].tolist()


def test_seats_that_cannot_be_computed_are_named(engine: Engine, thread: EngineThread) -> None:
    seats = seated(2)
    seats.take([1] * 6, 6, Sampling(2), [150])  # its sixth token has no page
    seats.take([1], 1, Sampling(2), [200])  # no page of the pool
    thread.submit([], seats)
    end = ended(thread)
    assert set(end.seat_errors) == {2, 3}
    assert all(isinstance(error, EngineError) for error in end.seat_errors.values())


def test_a_thread_that_stops_in_a_step_leaves_nothing_open(engine: Engine) -> None:
    engine.kv.tensor.zero_()
    seats = seated(2)
    want = engine.run_seated(seats, [])[0]
    engine.kv.tensor.zero_()
    before = engine.kv.tensor.clone()
    thread, files = EngineThread(engine), len(os.listdir("/proc/self/fd"))
    thread.submit([], seats)
    ended(thread)
    thread.submit([], seats)
    thread.stop()
    after = engine.kv.tensor.clone()
    assert np.any(after.numpy() != before.numpy()) and len(os.listdir("/proc/self/fd")) < files
    assert engine.run_seated(seats, [])[0].tolist() == want.tolist()
