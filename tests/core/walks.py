"""Walks through a world of `between`: by a seed, or by hypothesis, which shrinks what it finds to a story."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from between import Between
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


def wander(world: Between, seed: int, steps: int, moves: list[str], weights: list[int]) -> None:
    """Chooses so many moves, then lets everything end."""
    choose = random.Random(seed)
    for name in choose.choices(moves, weights, k=steps):
        getattr(world, name)(choose.randrange(1 << 20))
        world.consistent()
    world.quiesce()
    world.check_quiet()


def walk(moves: Sequence[str], onward: Sequence[str]) -> type[RuleBasedStateMachine]:
    """`onward`: moves that bring requests on, taken several at a time. A subclass makes `self.world` first."""

    class Walk(RuleBasedStateMachine):
        world: Any

        @rule(name=st.sampled_from(moves), pick=st.integers(0, 1 << 16))
        def move(self, name: str, pick: int) -> None:
            getattr(self.world, name)(pick)

        @rule(picks=st.lists(st.tuples(st.sampled_from(onward), st.integers(0, 255)), max_size=8))
        def progress(self, picks: list[tuple[str, int]]) -> None:
            for name, pick in picks:
                getattr(self.world, name)(pick)

        @invariant()
        def consistent(self) -> None:
            if hasattr(self, "world"):
                self.world.consistent()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                self.world.quiesce()
                self.world.check_quiet()

    return Walk
