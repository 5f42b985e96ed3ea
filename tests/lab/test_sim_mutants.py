"""Guards that show in a whole cluster: with one removed a seed breaks a rule, which is clean with it."""

from __future__ import annotations

import inspect

import pytest

from quiesce.lab.sim.command import hunt
from quiesce.lab.sim.mutants import SIM_MUTANTS, SimMutant
from quiesce.lab.sim.run import simulate
from quiesce.lab.sim.shrink import shrunk

REQUESTS = 60
MOST_SEEDS = 200
FIRST = {
    "D4 no clock": 70,
    "D7 bound": 35,
    "closed set pull": 50,
    "N3": 15,
    "H13": 15,
}  # where a long search starts; docs/sim.md counts from 0
# Guards of the simulator whose part exists; docs/sim.md says which do not.
MARKED = {"H1", "H10", "H11", "H13", "H16", "N3", "N8", "A9", "D2", "D4", "D6", "D7"}


@pytest.mark.parametrize("mutant", SIM_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seed_that_fails_on_the_mutant_passes_on_main(mutant: SimMutant) -> None:
    report, searched = hunt(mutant, MOST_SEEDS, REQUESTS, FIRST.get(mutant.name, 0))
    assert report is not None and report.broken is not None, f"{mutant.name} survived {searched} seeds"
    clean = simulate(report.world)
    assert clean.broken is None, f"seed {report.world.seed} breaks without the mutant: {clean.broken}"


def test_a_failing_seed_is_made_smaller_and_told() -> None:
    mutant = next(mutant for mutant in SIM_MUTANTS if mutant.name == "H11")
    report, _ = hunt(mutant, MOST_SEEDS, REQUESTS)
    assert report is not None and report.broken is not None
    with mutant.made():
        small, story = shrunk(report.world, report.broken, mutant.strict)
        again, same = shrunk(report.world, report.broken, mutant.strict)
    assert (again, same) == (small, story)
    assert len(small.requests) < len(report.world.requests) / 2
    assert len(small.faults) <= len(report.world.faults)
    assert report.broken.rule in story[-1]
    assert any("takes pages" in line for line in story) and any("bytes of A land" in line for line in story)


def test_every_guard_marked_for_the_simulator_has_a_mutant_where_its_part_exists() -> None:
    covered = {guard for mutant in SIM_MUTANTS for guard in mutant.guards}
    assert sorted(MARKED - covered) == []


def test_mutants_are_patches_of_at_most_ten_lines() -> None:
    for mutant in SIM_MUTANTS:
        for change in mutant.changes:
            if callable(change.new):
                lines = inspect.getsource(change.new).splitlines()
                start = next(i for i, line in enumerate(lines) if line.startswith("def "))
                assert len(lines) - start <= 11, f"{mutant.name}: {len(lines) - start} lines"
