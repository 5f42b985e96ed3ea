"""A transport that promises less than it must. Not mutants of the core: they show what its proofs rest on."""

from __future__ import annotations

from typing import Any

from quiesce.core.borrower import Outcome
from quiesce.lab.checker.model import Model
from quiesce.lab.checker.processes import FLYING, HALF, LOOSE, REFUSED
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_ended = Model._ended
real_launch = Model._launch
real_bound = Model._bound


@mutant("fence: flush", "H16", "a fence that lets later posts through", arenas.FENCE_CHUNKS, (Model, "_launch"))
def flush(self: Model, number: int, decodes: Any, prefills: Any) -> int:
    return number * 4 + FLYING


@mutant("fence: placed", "H16", "a refused post that says PLACED", arenas.FENCE_SHARED, (Model, "_ended"))
def placed(self: Model, state: Any, i: int, outcome: Any, spend: Any = None) -> Any:
    if state[3][i] & 3 != REFUSED:
        return real_ended(self, state, i, outcome, spend)
    move = real_ended(self, state, i, Outcome.PLACED, spend)
    return (
        move
        if move.state is None
        else move._replace(state=(*move.state[:4], move.state[4] & state[4], move.state[5]))
    )


@mutant("siblings", "A10", "a split post that ends with its first failed part", arenas.WIDE, (Model, "_ended"))
def siblings(self: Model, state: Any, i: int, outcome: Any, spend: Any = None) -> Any:
    move = real_ended(self, state, i, outcome, spend)
    if outcome is not Outcome.FAILED_CLEAN or move.state is None:
        return move
    posts = tuple(sorted([*move.state[3], (state[3][i] & ~3) | LOOSE]))
    return move._replace(state=(*move.state[:3], posts, *move.state[4:]))


@mutant("placed: half", "L3", "a post that says PLACED with half of it there", arenas.HALVES, (Model, "_ended"))
def half(self: Model, state: Any, i: int, outcome: Any, spend: Any = None) -> Any:
    move = real_ended(self, state, i, outcome, spend)
    if state[3][i] & 3 != HALF or outcome is not Outcome.PLACED or move.state is None:
        return move
    posts = tuple(sorted([*move.state[3], (state[3][i] & ~3) | LOOSE]))
    return move._replace(state=(*move.state[:3], posts, move.state[4] & state[4], move.state[5]))


@mutant("placement", "A14", "placement by address, not by epoch", arenas.CRASH_D, (Model, "_bound"))
def placement(self: Model, posts: tuple[int, ...]) -> tuple[int, ...]:
    return posts
