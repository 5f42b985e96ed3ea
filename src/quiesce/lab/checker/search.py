"""Breadth-first search of one world: the first violation found is a shortest one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quiesce.lab.checker.model import Model
from quiesce.lab.checker.processes import Event, State
from quiesce.lab.checker.pull import model_of
from quiesce.lab.worlds import World


@dataclass(slots=True)
class Result:
    world: World
    states: int = 0
    moves: int = 0
    depth: int = 0
    seconds: float = 0.0
    real_steps: int = 0
    complete: bool = False
    broken: str | None = None
    story: list[tuple[State, Event]] = field(default_factory=list)  # (state before, event)
    told: list[str] = field(default_factory=list)  # a story that tells itself
    model: Model | None = None


Came = dict[State, tuple[State, Event] | None]  # state -> (the state before, the event); None at the start
Progress = Callable[[Result, int], bool]  # (so far, states waiting) -> go on?


def search(
    world: World, *, strict: bool = True, limit: int | None = None, progress: Progress | None = None
) -> Result:
    """Searches to the end, to the first violation, to `limit` states, or until `progress` says stop."""
    model = model_of(world, strict=strict)
    result = Result(world, model=model)
    began = time.perf_counter()
    first = model.start()
    came: Came = {first: None}
    layer = [first]
    while layer:
        after: list[State] = []
        for done, state in enumerate(layer):
            for move in model.moves(state):
                result.moves += 1
                if move.state is None:
                    result.broken = move.broken
                    result.story = [*path_to(came, state), (state, move.event)]
                    return _finish(result, came, began)
                if move.state not in came:
                    came[move.state] = (state, move.event)
                    after.append(move.state)
            if done % 2048 == 0:
                result.states = len(came)
                stop = progress is not None and not progress(result, len(layer) - done + len(after))
                if stop or (limit is not None and len(came) > limit):
                    return _finish(result, came, began)
        result.depth += bool(after)
        layer = after
    result.complete = True
    return _finish(result, came, began)


def path_to(came: Came, state: State) -> list[tuple[State, Event]]:
    """(state before, event) of every step from the start to `state`."""
    story = []
    step = came[state]
    while step is not None:
        story.append(step)
        step = came[step[0]]
    return story[::-1]


def _finish(result: Result, came: Came, began: float) -> Result:
    result.states = len(came)
    result.seconds = time.perf_counter() - began
    assert result.model is not None
    result.real_steps = result.model.real_steps
    return result
