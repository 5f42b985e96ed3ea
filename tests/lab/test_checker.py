"""The checker itself: what it calls equal is equal, and what it remembers is what the real machines do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quiesce.core import pull_lender
from quiesce.core.ledger import Ledger
from quiesce.core.machine import Timer
from quiesce.core.messages import Drained, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.pull_lender import PullLender
from quiesce.core.pulling import LENT
from quiesce.lab.checker.freeze import COUNTED, NOT_STATE, PACING, freeze
from quiesce.lab.checker.model import Model
from quiesce.lab.checker.processes import HOLE, SOURCE
from quiesce.lab.checker.pull import PullModel, Read, model_of
from quiesce.lab.checker.pull_sides import ReadingSide, SourceSide
from quiesce.lab.checker.search import search
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


WALKED = [w for w in WORLDS if not w.live and not w.pull][:10]
WALKED += [w for w in WORLDS if (w.pull or w.led) and not w.live]


@pytest.mark.parametrize("world", WALKED, ids=lambda world: world.name)
def test_remembered_steps_are_what_the_real_machines_do_along_random_paths(world: World) -> None:
    """Walks the world twice: once through the checker, once with live processes that are never frozen."""
    pick = random.Random(world.name)
    model = model_of(world)
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
    if event[0] == "takes":  # in the network: no process hears of it
        assert before[:2] == after[:2]
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


# ---------------------------------------------------------------- pull: what the check after landing is worth

UNSOUND = World("unsound", "", pool=2, sources=1, pull=True)


def free_on_silence(self: PullLender, transfer: Any, event: Any) -> Any:
    return self._given_up(transfer, Drained(self._leg(transfer)))


def test_the_check_after_landing_catches_what_a_source_that_frees_too_early_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that are reused under a read: never committed, as long as the grant ends first (guard L10)."""
    monkeypatch.setitem(pull_lender.TABLE, (LENT, Timer.LEASE), free_on_silence)
    result = search(UNSOUND, strict=False)
    assert result.broken == SOURCE, "the bytes travel, whoever finds it out"

    sound = PullModel._damage
    monkeypatch.setattr(
        PullModel, "_damage", lambda self, state: (move for move in sound(self, state) if move.broken != SOURCE)
    )
    result = search(UNSOUND, strict=False)
    assert result.broken is None and result.complete, "another's bytes arrive, and no request commits with them"

    monkeypatch.setattr(PullLender, "_before_close", lambda self, peer: None)
    result = search(UNSOUND, strict=False)
    assert result.broken == HOLE, "the grant had not ended: the check passed"


def test_a_read_is_of_the_right_prompt_only_while_the_engine_it_was_posted_to_lives() -> None:
    world = World("taken", "", (1,), pool=1, sources=1, crash_p=1, successor=True, pull=True)
    model = model_of(world)
    assert isinstance(model, PullModel)
    taken = set()
    seen, todo = {model.start()}, [model.start()]
    while todo:
        state = todo.pop()
        for move in model.moves(state):
            assert move.state is not None
            if move.event[0] == "takes":
                read: Read = model.flights[move.event[1] >> 2]
                taken.add((model.views[state[1][0]].epoch == read.leg.p_epoch, move.event[2]))
            if move.state not in seen:
                seen.add(move.state)
                todo.append(move.state)
    assert taken == {(True, (True,)), (False, (False,))}


def test_reads_in_flight_are_told_apart_by_what_they_carry_not_by_their_number() -> None:
    world = World("numbers", "", requests=(1, 1), pool=2, sources=2, pull=True)
    ends = set()
    for order in ((1, 2), (2, 1)):
        reader, source = ReadingSide(world, 1, 0, (100,), 0), SourceSide(world, 100, 0, 1)
        offers = {}
        for seq in (1, 2):
            [request] = reader.step(world, ("reserve",)).sends
            source.step(world, ("hear", request, 1))
            [offers[seq]] = source.step(world, ("lend", TransferId(1, seq))).sends
        for seq in order:
            assert len(reader.step(world, ("hear", offers[seq], 100)).posts) == 1
        ends.add(freeze(reader))
    assert len(ends) == 1
