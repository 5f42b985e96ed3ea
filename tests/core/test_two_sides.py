"""The real lender and real borrowers against loss, duplication, reordering, crashes, faults and fences."""

from __future__ import annotations

import random

import pytest
from core_world import MOVES, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from walks import walk, wander

NAMES = [name for name, _ in MOVES]
WEIGHTS = [weight for _, weight in MOVES]


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_write_lands_in_foreign_pages_and_everything_closes(ranks: int, fences: bool, drains: bool):
    committed = lost = 0
    for seed in range(25):
        world = World(ranks, fences=fences, drains=drains)
        wander(world, seed, 500, NAMES, WEIGHTS)
        committed += world.committed
        lost += world.lost
    assert committed > 5 and lost > 5, "the walk must see both ends"


def test_no_write_lands_in_foreign_pages_when_the_lender_restarts():
    for seed in range(25):
        wander(World(2), seed, 500, [*NAMES, "crash_decode"], [*WEIGHTS, 1])


def test_without_faults_everything_commits():
    moves = ["request", "publish", "deliver", "compute", "land", "fire", "ping"]
    for seed in range(10):
        world = World(2)
        choose = random.Random(seed)
        for _ in range(600):
            getattr(world, choose.choice(moves))(choose.randrange(1 << 14) * 496 + 1)
            world.outcome(1, unknown=False)
            world.verify(1, matches=True)
        assert world.committed and not world.lost


class TwoSides(walk([*NAMES, "crash_decode"], ["publish", "deliver", "compute"])):
    """The same world under hypothesis."""

    @initialize(ranks=st.integers(1, 2), fences=st.booleans(), drains=st.booleans())
    def start(self, ranks: int, fences: bool, drains: bool) -> None:
        self.world = World(ranks, fences=fences, drains=drains)


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
