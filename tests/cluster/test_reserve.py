"""`--reserve`: early takes decode pages with the request, late when prefill's queue has reached it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults
from quiesce.roles.late import MOST_ROOMS, PATIENCE, UNASKED, Asking, Turns

PAIR = ("prefill-0", "decode-0")
PROMPTS = [[8 + (seed * 37 + position * 11) % 480 for position in range(96)] for seed in range(8)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("reserve", ["early", "late"])
def test_late_pins_no_decode_pages_through_prefills_queue(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]], reserve: str
) -> None:
    with Cluster(
        tiny, run_dir, page_size=16, chunked_prefill_size=64, max_running=16, max_total_tokens=2048
    ) as cluster:
        gate = run_dir / "gate"
        cluster.spawn("prefill", "prefill-0", Faults(ms_per_page=(30, 30), gate=str(gate)))
        cluster.spawn("decode", "decode-0", reserve=reserve)
        cluster.wait_for(*PAIR)
        expected = oracle(PROMPTS)

        def pinned() -> int:
            return sum(cluster.inspect("decode-0")["transfers"].get(state, 0) for state in ("reserved", "offered"))

        def most_pinned() -> int:
            """While one crowd is served, which has to wait for prefill's first writes."""
            gate.touch()
            requests = [cluster.start(prompt, Sampling(max_tokens=12, ignore_eos=True), PAIR) for prompt in PROMPTS]
            cluster.until(lambda: pinned() > (2 if reserve == "early" else 0), 30, "offers")
            cluster.until_time(0.3)
            most = pinned()
            gate.unlink()
            while not all(request.over for request in requests):
                most = max(most, pinned())
            assert [request.tokens for request in requests] == expected
            return most

        if reserve == "early":
            most_pinned()
        else:  # a turn that decode leaves unused for a second goes to the next, and then it may use both
            assert any(most_pinned() <= 2 for _ in range(3))
        for name in PAIR:
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lost_question_and_a_lost_answer_are_asked_for_again() -> None:
    clock, asked, said = Clock(), [], []
    asking = Asking(lambda epoch, room: asked.append(room) or True, clock)
    turns = Turns(lambda epoch, room: said.append(room) or True, clock)
    assert not asking.may_offer(1, 7)
    assert not asking.may_offer(1, 7)
    assert asked == [7], "not asked again at once"
    clock.now += 0.3
    asking.may_offer(1, 7)
    assert asked == [7, 7]
    turns.asked(2, 7)
    turns.call(1, lambda room: True)
    turns.asked(2, 7)
    assert said == [7, 7]
    asking.reached(7)
    assert asking.may_offer(1, 7)


def test_a_turn_that_is_not_used_passes_to_the_next_and_unknown_rooms_keep_their_place() -> None:
    clock, said = Clock(), []
    turns = Turns(lambda epoch, room: said.append(room) or True, clock)
    for room in (1, 2, 3):
        turns.asked(9, room)
    turns.call(1, lambda room: room != 1)
    turns.call(1, lambda room: room != 1)
    assert said == [2], "one place; room 1 has no request here yet"
    clock.now += PATIENCE + 0.1
    turns.call(1, lambda room: True)
    assert said == [2, 1]
    turns.forget(1)
    turns.call(1, lambda room: True)
    assert said == [2, 1, 3]
    turns.forget(3)
    assert len(turns) == 0
    for room in range(MOST_ROOMS + 50):
        turns.asked(9, room)
    assert len(turns) == MOST_ROOMS
    turns.drop(9)
    assert len(turns) == 0


def test_a_question_that_comes_after_its_request_has_ended_is_forgotten() -> None:
    clock = Clock()
    turns = Turns(lambda epoch, room: True, clock)
    for room in (1, 2):
        turns.asked(9, room)
    for _ in range(10):  # the request of room 2 lives, only its leg has not arrived here yet
        clock.now += UNASKED / 2
        turns.asked(9, 2)
        turns.call(0, lambda room: False)
    assert len(turns) == 1
    turns.call(1, lambda room: room == 2)
    turns.forget(2)
    assert len(turns) == 0
