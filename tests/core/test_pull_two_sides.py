"""The two machines of pull against loss, duplication, reordering, crashes, faults and fences."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from pull_world import MOVES, PullWorld
from walks import walk, wander

from quiesce.lab.mutants import MUTANTS

NAMES = [name for name, _ in MOVES]
WEIGHTS = [weight for _, weight in MOVES]
STEPS = 400


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("own_fences", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_read_takes_or_lands_where_it_must_not_and_everything_closes(ranks: int, fences: bool, own_fences: bool):
    committed = lost = 0
    for seed in range(60):
        world = PullWorld(ranks, fences=fences, own_fences=own_fences)
        wander(world, seed, STEPS, NAMES, WEIGHTS)
        committed += world.committed
        lost += world.lost
    assert committed > 5 and lost > 5, "the walk must see both ends"


def test_the_reader_may_restart():
    for seed in range(20):
        wander(PullWorld(2), seed, STEPS, [*NAMES, "crash_decode"], [*WEIGHTS, 1])


def test_without_faults_every_pull_commits():
    moves = ["request", *["deliver"] * 6, "compute", "take", "land", "check"]
    for seed in range(10):
        world = PullWorld(2)
        choose = random.Random(seed)
        for _ in range(500):
            getattr(world, choose.choice(moves))(choose.randrange(1 << 14) * 31 * 29 + 1)
            world.outcome(1, unknown=False)
        assert world.committed and not world.lost


class PullTwoSides(walk([*NAMES, "crash_decode"], ["deliver", "compute", "outcome"])):
    """The same world under hypothesis."""

    @initialize(ranks=st.integers(1, 2), fences=st.booleans(), own_fences=st.booleans())
    def start(self, ranks: int, fences: bool, own_fences: bool) -> None:
        self.world = PullWorld(ranks, fences=fences, own_fences=own_fences)


TestPullTwoSides = PullTwoSides.TestCase
TestPullTwoSides.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("name", ["H14 pull", "H1 pull", "A9 pull", "L10", "H11 pull"])
def test_the_walk_would_notice(name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    with mutant.made(), pytest.raises(AssertionError):
        for seed in range(300):
            wander(PullWorld(1, own_fences=False), seed, STEPS, NAMES, WEIGHTS)
