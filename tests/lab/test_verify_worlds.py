"""The worlds that are small enough for every test run, searched to the end on the real core classes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quiesce.lab.deep_worlds import DEEP
from quiesce.lab.mutants import MUTANTS
from quiesce.lab.verify import UnknownWorld, choose, run, verify
from quiesce.lab.worlds import WORLDS, World

# World -> states it must have at the least: a search that sees fewer has lost events.
SLICE = {
    "taint": 9_000,
    "chunks": 3_000,
    "together": 3_000,
    "crash": 2_000,
    "crash twice": 3_000,
    "restart": 9_000,
    "both": 6_000,
    "fence": 15_000,
    "digest": 8_000,
    "short": 2_500,
    "mispaired": 1_000,
    "full": 9_000,
    "decodes": 3_000,
    "led": 6_000,
    "led digest": 7_000,
    "led restart": 8_000,
    "pull": 15_000,
    "pull late": 15_000,
    "pull crash": 15_000,
    "pull crash two": 20_000,
    "pull chunks": 20_000,
    "handshake": 6_000,
    "left alone": 4_000,
    "left crash": 3_000,
    "left fence": 3_000,
    "left ranks": 4_000,
    "left decodes": 4_000,
    "left pull": 20_000,
}

# The slowest: in `make test-long`, and in `quiesce verify`.
LONG = (
    "pull ranks",
    "left pull fence",
    "three",
    "pull both",
    "pull ranks crash",
    "led two",
    "left pull crash",
    "pull pings",
)


def by_name(name: str) -> World:
    return next(world for world in WORLDS if world.name == name)


@pytest.mark.parametrize("name", SLICE)
def test_no_interleaving_of_this_world_breaks_a_rule(name: str) -> None:
    [result] = verify([by_name(name)])
    assert result.broken is None, result.story
    assert result.complete
    assert result.states >= SLICE[name]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [world.name for world in WORLDS if world.name not in (*SLICE, *LONG)])
def test_no_interleaving_of_this_larger_world_breaks_a_rule(name: str) -> None:
    [result] = verify([by_name(name)])
    assert result.broken is None, result.story
    assert result.complete


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_no_interleaving_of_this_largest_world_breaks_a_rule(name: str) -> None:
    [result] = verify([by_name(name)])
    assert result.broken is None, result.story
    assert result.complete


def test_every_world_has_a_name_of_its_own() -> None:
    names = [world.name for world in (*WORLDS, *DEEP)]
    assert len(set(names)) == len(names)


def test_time_that_runs_out_is_never_reported_as_searched_to_the_end() -> None:
    results = list(verify([by_name("fence"), by_name("taint")], seconds=0.0))
    assert [result.complete for result in results] == [False, False]
    assert all(result.broken is None for result in results)


def test_an_unknown_world_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UnknownWorld, match="crash fence"):
        choose("crahs", deep=False)
    said = io.StringIO()
    assert run(world="crahs", console=Console(file=said, width=400)) == 2
    assert "there is no world 'crahs'" in said.getvalue()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_search_of_nothing_is_refused_and_not_reported_as_clean(seconds: float) -> None:
    said = io.StringIO()
    assert run(world="crash", seconds=seconds, console=Console(file=said, width=200)) == 2
    assert "--seconds must be above 0" in said.getvalue() and "no rule broken" not in said.getvalue()


def test_options_that_the_mutants_would_not_heed_are_refused() -> None:
    said = io.StringIO()
    assert run(mutants=True, deep=True, console=Console(file=said, width=200)) == 2
    assert run(mutants=True, seconds=5.0, console=Console(file=said, width=200)) == 2
    assert "leave out --deep and --seconds" in said.getvalue()


def test_a_violation_is_told_and_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "H11")
    monkeypatch.setattr("quiesce.lab.verify.WORLDS", (mutant.world,))
    said = io.StringIO()
    with mutant.made():
        assert run(world=mutant.world.name, console=Console(file=said, width=200)) == 1
    assert "a rule is broken" in said.getvalue() and "  1. D reserves page 0 for A" in said.getvalue()
    said = io.StringIO()
    assert run(world=mutant.world.name, console=Console(file=said, width=200)) == 0


def test_the_report_names_world_states_and_depth() -> None:
    said = io.StringIO()
    assert run(world="crash", console=Console(file=said, width=200)) == 0
    text = said.getvalue()
    assert "to the end" in text
    assert "1 of 1 worlds searched to the end" in text
