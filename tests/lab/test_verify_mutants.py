"""Every guard matters: with only that one removed, the checker finds damage and can tell how it came about."""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
from rich.console import Console

from quiesce.core import borrower, lender, pull_lender, pull_reader
from quiesce.lab.mutants import MUTANTS, Mutant
from quiesce.lab.verify import hunt, run, story_of

HOLDING = {"H1", "H2", "H3", "H4", "H5", "H7", "H11", "H14", "H15", "H16", "H17"}
TELLING = {"N1", "N2", "N3", "N5", "N7", "N9", "N10"}
ANSWERING = {"A1", "A2", "A3", "A4", "A5", "A6", "A7", "A9", "A10", "A11", "A13", "A14", "A15"}
LANDING = {"L2", "L3", "L4", "L5", "L6", "L9", "L10"}
MARKED = HOLDING | TELLING | ANSWERING | LANDING | {"H8", "R4"}

DAMAGE = ("damage", "leaked", "commits", "every timer fires", "hears", "free again", "ends", "gives up", "frees")


def rows() -> list[Any]:
    tables = (lender.TABLE, lender.PEER_TABLE, borrower.TABLE, pull_lender.TABLE, pull_reader.TABLE)
    return [*(table.copy() for table in tables), lender.DESIGNATED_RANK]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught_with_a_story(mutant: Mutant) -> None:
    before = rows()
    result = hunt(mutant)
    assert result.broken is not None, f"{mutant.name} survived {result.states} states of {mutant.world.name}"
    story = story_of(result, mutant)
    assert 2 <= len(story) <= 24
    assert any(word in " ".join(story) for word in DAMAGE)
    assert rows() == before, "the mutant outlived its `with`"


def test_every_guard_marked_for_the_checker_has_a_mutant() -> None:
    covered = {guard for mutant in MUTANTS for guard in mutant.guards}
    assert sorted(MARKED - covered) == []


def test_mutants_are_patches_of_at_most_ten_lines() -> None:
    for mutant in MUTANTS:
        for change in mutant.changes:
            if callable(change.new):
                lines = inspect.getsource(change.new).splitlines()
                start = next(i for i, line in enumerate(lines) if line.startswith("def "))
                assert len(lines) - start <= 11, f"{mutant.name}: {len(lines) - start} lines"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_same_world_is_clean_without_the_mutant(mutant: Mutant) -> None:
    """What a mutant shows is the mutant's, not the world's."""
    result = hunt(
        Mutant(mutant.name, (), "nothing removed", mutant.world, (), mutant.live, mutant.strict), limit=4_000
    )
    assert result.broken is None, result.story


def test_the_story_of_the_tombstone_is_told_event_by_event() -> None:
    mutant = next(m for m in MUTANTS if m.name == "N5 abort")
    story = story_of(hunt(mutant), mutant)
    assert story[0] == "  1. D reserves page 0 for A"
    assert any("P hears ABORT(A) -> says NEVER_STARTED(A)" in line for line in story)
    assert story[-1].endswith("A's bytes from P land in page 0, which belongs to B: damage")


@pytest.mark.parametrize(("name", "must"), [("N7", "P fails A"), ("A3 register", "P hears ABORT(A)")])
def test_what_is_never_answered_is_what_the_mutant_removed(name: str, must: str) -> None:
    """A mutant that silences more than its guard would be caught for something else."""
    mutant = next(m for m in MUTANTS if m.name == name)
    assert any(must in line for line in story_of(hunt(mutant), mutant))


def test_the_command_prints_the_story_and_fails_for_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    assert run(mutants=True, world="H11", console=Console(file=said, width=200)) == 0
    assert "1 of 1 mutants caught" in said.getvalue()
    mutant = next(m for m in MUTANTS if m.name == "H11")
    tame = Mutant("tame", ("H11",), "nothing removed", mutant.world, ())
    monkeypatch.setattr("quiesce.lab.verify.MUTANTS", [tame])
    said = io.StringIO()
    assert run(mutants=True, console=Console(file=said, width=200)) == 1
    assert "0 of 1 mutants caught" in said.getvalue()
