"""Every hold ends or may be retained: from each state a fair path leads to one where nothing is owed.

Here a delivery consumes its message and any message may be lost; what is repeated arrives in the end. Fair moves
are deliveries, timers, outcomes, fences that can be had and PINGs; crashes, losses, aborts, deadlines and new
requests are not: nobody may have to wait for them.
"""

from __future__ import annotations

import time

from quiesce.core import lender as d
from quiesce.lab.checker.model import LOOSE, Model, State
from quiesce.lab.checker.search import Progress, Result, path_to
from quiesce.lab.worlds import World

OWED = "from here no fair path leads to an end: a transfer or its source pages stay for ever"


def settled(model: Model, state: State) -> bool:
    """Nothing is owed: every transfer has ended, is running or may be retained, and no source page is kept."""
    decodes, prefills, _, posts, _, _ = state
    alive = {model.views[number].epoch for number in prefills}
    loose = {model.flights[post >> 2].leg for post in posts if post & 3 == LOOSE}
    world = model.world
    held = set()
    for number in decodes:
        for tid, transfer in model.views[number].side.lender.transfers.items():
            if transfer.state in (d.State.COMMITTED, d.State.QUARANTINE):
                continue
            if transfer.state is not d.State.HOLDING:
                return False
            held.add(tid)
            for peer in transfer.published.values():
                leg = peer.offer.leg
                dead = leg.p_epoch not in alive and not (world.fence or world.gone)
                tainted = leg in loose and leg.p_epoch in alive and not (world.fence or world.drain)
                if not peer.proven and not dead and not tainted:
                    return False
    return all(tid in held for number in prefills for tid in model.views[number].side.sources._holdings)


def search_live(world: World, *, limit: int | None = None, progress: Progress | None = None) -> Result:
    model = Model(world, strict=False, consume=True)
    result = Result(world, model=model)
    began = time.perf_counter()
    first = model.start()
    came: dict[State, tuple[State, tuple] | None] = {first: None}
    order = [first]
    number = {first: 0}
    before: list[list[int]] = [[]]  # state -> the states from which a fair move leads to it
    for at, state in enumerate(order):
        for move in model.moves(state):
            result.moves += 1
            if move.state is None:
                result.broken = move.broken
                result.story = [*path_to(came, state), (state, move.event)]
                return _close(result, order, came, began)
            to = number.get(move.state)
            if to is None:
                to = number[move.state] = len(order)
                order.append(move.state)
                before.append([])
                came[move.state] = (state, move.event)
            if move.fair:
                before[to].append(at)
        if at % 2048 == 0:
            result.states = len(order)
            stop = progress is not None and not progress(result, len(order) - at)
            if stop or (limit is not None and len(order) > limit):
                break
    else:
        result.complete = True
        stuck = _first_stuck(model, order, before)
        if stuck is not None:
            result.broken = OWED
            result.story = path_to(came, order[stuck])
    return _close(result, order, came, began)


def _close(result: Result, order: list[State], came: dict, began: float) -> Result:
    result.states = len(order)
    result.depth = len(path_to(came, order[-1]))
    result.seconds = time.perf_counter() - began
    assert result.model is not None
    result.real_steps = result.model.real_steps
    return result


def _first_stuck(model: Model, order: list[State], before: list[list[int]]) -> int | None:
    good = bytearray(len(order))
    todo = [at for at, state in enumerate(order) if settled(model, state)]
    for at in todo:
        good[at] = 1
    while todo:
        for at in before[todo.pop()]:
            if not good[at]:
                good[at] = 1
                todo.append(at)
    stuck = good.find(0)
    return None if stuck < 0 else stuck
