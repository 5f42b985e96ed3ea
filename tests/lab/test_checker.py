"""The checker itself: what it calls equal is equal, and what it remembers is what the real machines do."""

from __future__ import annotations

import random

import pytest

from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.core.pages import PagePool
from quiesce.lab.checker.freeze import COUNTED, NOT_STATE, PACING, freeze
from quiesce.lab.checker.model import Model
from quiesce.lab.checker.sides import DecodeSide, PrefillSide
from quiesce.lab.invariants import DECODE, LEDGER, broken
from quiesce.lab.worlds import WORLDS, World

SMALL = World("small", "", pool=1, unknown=1, crash_p=1, fence=True)


def test_freezing_forgets_order_of_dicts_but_not_of_queues() -> None:
    assert freeze({1: [2, 3], 4: {5}}) == freeze({4: {5}, 1: [2, 3]})
    assert freeze([1, 2]) != freeze([2, 1])


def test_freezing_forgets_statistics_and_nothing_else_of_a_ledger() -> None:
    one, other = (Ledger(PagePool(2), PagePool(2)) for _ in range(2))
    one.stale, one.opened = 7, 3
    assert freeze(one) == freeze(other)
    one.own(TransferId(1, 1), 1)
    assert freeze(one) != freeze(other)
    assert freeze(one, NOT_STATE | COUNTED | PACING) != freeze(other, NOT_STATE | COUNTED | PACING)


@pytest.mark.parametrize("world", [w for w in WORLDS if not w.live][:10], ids=lambda world: world.name)
def test_remembered_steps_are_what_the_real_machines_do_along_random_paths(world: World) -> None:
    """Walks the world twice: once through the checker, once with live processes that are never frozen."""
    pick = random.Random(world.name)
    model = Model(world)
    for _ in range(12):
        state = model.start()
        live: dict[int, DecodeSide | PrefillSide] = {}
        for at, number in enumerate(state[0] + state[1]):
            live[at] = model.thaw(number)
        for _ in range(25):
            ways = [move for move in model.moves(state) if move.state is not None]
            if not ways:
                break
            move = pick.choice(ways)
            _follow(model, world, live, move.event, state, move.state)
            state = move.state
            for at, number in enumerate(state[0] + state[1]):
                assert freeze(live[at], model.without) == freeze(model.thaw(number), model.without)


def _follow(model: Model, world: World, live: dict, event: tuple, before: tuple, after: tuple) -> None:
    if event[0] == "crash":
        changed = [
            at for at, (a, b) in enumerate(zip(before[0] + before[1], after[0] + after[1], strict=True)) if a != b
        ]
        for at in changed:
            live[at] = model.thaw((after[0] + after[1])[at])
        return
    assert event[0] == "at"
    _, at, local = event
    if isinstance(local, int):
        _, speaker, message = model.messages[local]
        local = ("hear", message, speaker)
    live[at].step(world, local)


def test_a_broken_ledger_is_seen_by_the_rule_about_it() -> None:
    side = DecodeSide(SMALL, 1, 0, (100,), 0)
    side.step(SMALL, ("reserve",))
    assert broken(side) is None
    side.ledger.pool._free.append(0)
    assert broken(side) == "no page is free while it belongs to a transfer"
    side.ledger.pool._free.remove(0)
    side.ledger.unsound = 1
    assert broken(side) == "a lease closes by a proof, never by an operator's wish or a timer"


def test_every_rule_has_one_line_of_english() -> None:
    for rule in (*LEDGER, *DECODE):
        assert 20 < len(rule) < 90 and not rule.endswith(".")


def test_posts_in_flight_are_told_apart_by_what_they_carry_not_by_their_number() -> None:
    """Two orders of the same posts end in the same state."""
    world = World("numbers", "", requests=(1, 1), pool=2, sources=2)
    ends = set()
    for order in ((1, 2), (2, 1)):
        side = PrefillSide(world, 100, 0, 1)
        decode = DecodeSide(world, 1, 0, (100,), 0)
        for seq in (1, 2):
            decode.step(world, ("reserve",))
            [offer] = decode.step(world, ("publish", TransferId(1, seq), 0)).sends
            side.step(world, ("hear", offer, 1))
        for seq in (1, 2):
            side.step(world, ("start", TransferId(1, seq)))
        for seq in order:
            side.step(world, ("compute", TransferId(1, seq), False))
        ends.add(freeze(side))
    assert len(ends) == 1
