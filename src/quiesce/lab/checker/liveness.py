"""Every hold ends or may be retained, and every request ends, whatever was lost.

From every reachable state the network is emptied, as if all that is under way were lost, and the processes are left
to themselves: messages arrive, posts end, fences that can be had are had, timers fire when nothing else is left.
Nobody aborts, crashes, begins a request or hits a deadline. If that run comes back to a state it was in before
anything is settled, what is owed is owed for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from quiesce.core import lender as d
from quiesce.core.machine import Timer
from quiesce.lab.checker.model import Model, Move
from quiesce.lab.checker.processes import LOOSE, Event, State
from quiesce.lab.checker.pull import PullModel, model_of
from quiesce.lab.checker.ranks import RanksModel
from quiesce.lab.checker.search import Came, Progress, Result, path_to
from quiesce.lab.worlds import World

OWED = "left to themselves, the processes never end it: a transfer or its source pages stay for ever"


def settled(model: Model, state: State) -> bool:
    """Nothing is owed: every transfer has ended, is running or may be retained, and no source page is kept."""
    if isinstance(model, PullModel):
        return model.settled(state)
    if isinstance(model, RanksModel) and not model.agreed(state):
        return False
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


class Runner:
    """Runs a state on its own; remembers which states came to a good end."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.good: set[State] = set()

    def stuck(self, state: State) -> list[tuple[State, Event]] | None:
        """None: all is settled in the end. Otherwise the run, up to where it repeats itself or a rule breaks."""
        run: dict[State, Event] = {}
        while state not in self.good and not settled(self.model, state):
            move = None if state in run else next(self._ways(state), None)
            if move is None or move.state is None:
                return list(run.items())
            run[state] = move.event
            state = move.state
        self.good.update(run)
        self.good.add(state)
        return None

    def _ways(self, state: State) -> Iterator[Move]:
        """Fair moves, the first of which is taken: what is under way first, timers last."""
        model = self.model
        decodes, prefills, net, posts, placed, budgets = state
        if net:
            bit = net & -net
            number = bit.bit_length() - 1
            at = model.messages[number][0]
            step = model.local((decodes + prefills)[at], number)
            yield model._merge((decodes, prefills, net & ~bit, posts, placed, budgets), at, number, step)
        timers = []
        for move in model.moves(state):
            if not move.fair or move.state == state:
                continue
            if move.event[0] == "at" and isinstance(move.event[2], tuple) and move.event[2][0] == "fire":
                timers.append(move)
            else:
                yield move
        for rank in range(len(decodes)):
            yield from model.heartbeat(state, rank)
        # Each timer that fires is armed again or gone: the least repeated first would need a clock, all will do.
        if timers:
            yield self._all_timers(state)

    def _all_timers(self, state: State) -> Move:
        """Every armed timer fires, one after the other, as if a long time had passed."""
        model = self.model
        count = len(state[0]) + len(state[1])
        for at in range(count):
            for event in model.views[(state[0] + state[1])[at]].may:
                if event[0] != "fire" or event[1] is Timer.DEADLINE:
                    continue
                side_id = (state[0] + state[1])[at]
                if event not in model.views[side_id].may:
                    continue
                if event[1] is Timer.LEASE and isinstance(model, PullModel) and model.renewed(state, at, event[2]):
                    continue
                move = model._merge(state, at, event, model.local(side_id, event))
                if move.state is None:
                    return move
                state = move.state
        return Move(("later",), state)


def search_live(world: World, *, limit: int | None = None, progress: Progress | None = None) -> Result:
    model = model_of(world, strict=False, paced=True)
    runner = Runner(model)
    result = Result(world, model=model)
    began = time.perf_counter()
    first = model.start()
    came: Came = {first: None}
    layer, asked = [first], set()
    while layer:
        after: list[State] = []
        for done, state in enumerate(layer):
            alone = (*state[:2], 0, *state[3:])
            if alone not in asked:
                asked.add(alone)
                run = runner.stuck(alone)
                if run is not None:
                    return _stop(result, came, began, OWED, [*path_to(came, state), (state, ("all lost",)), *run])
            for move in model.moves(state):
                result.moves += 1
                if move.state is None:
                    story = [*path_to(came, state), (state, move.event)]
                    return _stop(result, came, began, move.broken, story)
                if move.state not in came:
                    came[move.state] = (state, move.event)
                    after.append(move.state)
            if done % 1024 == 0:
                result.states = len(came)
                stop = progress is not None and not progress(result, len(layer) - done + len(after))
                if stop or (limit is not None and len(came) > limit):
                    return _stop(result, came, began, None, [])
        result.depth += bool(after)
        layer = after
    result.complete = True
    return _stop(result, came, began, None, [])


def _stop(result: Result, came: Came, began: float, broken: str | None, story: list[tuple[State, Event]]) -> Result:
    result.broken, result.story = broken, story
    result.states = len(came)
    result.seconds = time.perf_counter() - began
    assert result.model is not None
    result.real_steps = result.model.real_steps
    return result
