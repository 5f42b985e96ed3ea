"""The tables in docs/ name what there is: each world, each mutant, each with its guards and in the same words."""

from __future__ import annotations

from pathlib import Path

from test_verify_worlds import LONG

from quiesce.lab.mutants import MUTANTS
from quiesce.lab.sim.mutants import SIM_MUTANTS
from quiesce.lab.worlds import WORLDS

DOCS = Path(__file__).parents[2] / "docs"
GRAPHS = ("safety", "liveness", "handshake")


def rows(name: str, width: int) -> list[list[str]]:
    lines = (DOCS / name).read_text("utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in table if len(row) == width and not row[0].startswith("---")]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def test_the_table_of_worlds_is_the_table_that_is_searched() -> None:
    told = [row for row in rows("verify.md", 5) if row[2] in GRAPHS]
    graphs = ["handshake" if w.handshake else "liveness" if w.live else "safety" for w in WORLDS]
    there = [[w.name, w.about.removeprefix("liveness: "), graph] for w, graph in zip(WORLDS, graphs, strict=True)]
    assert [row[:3] for row in told] == there
    assert sum(number(row[3]) for row in told if row[0] not in LONG) >= 1_000_000, "in `make test` alone"
    whole = f"{len(WORLDS)} worlds, {sum(number(row[3]) for row in told):,} states"
    assert whole in (DOCS / "verify.md").read_text("utf-8")


def test_the_table_of_mutants_has_every_mutant_with_its_guards() -> None:
    told = [row for row in rows("verify.md", 5) if row[2] not in GRAPHS][2:]  # without the two heads
    assert sorted(row[:3] for row in told) == sorted([m.name, " ".join(m.guards), m.about] for m in MUTANTS)
    assert all(number(row[3]) > 0 and 2 <= number(row[4]) <= 24 for row in told)


def test_the_table_of_the_simulators_mutants_has_every_one_of_them() -> None:
    told = rows("sim.md", 6)[1:]
    assert sorted(row[:3] for row in told) == sorted([" ".join(m.guards), m.name, m.about] for m in SIM_MUTANTS)


def test_every_mutant_that_replaces_two_places_is_a_pair_or_is_named_with_its_reason() -> None:
    text = (DOCS / "verify.md").read_text("utf-8")
    reasons = text.split("Four replace two")[1].split("\n")[0]
    two = [m for m in MUTANTS if len(m.changes) > 1]
    alone = [m.name for m in two if " + " not in m.name and m.name != "N10"]
    assert sorted(alone) == sorted(["A2", "L10 early", "H8 release", "challenges"])
    assert all(name in reasons for name in alone)


# Guards that a simulated cluster is to show; a part that does not exist yet has its reason in the second table.
SIMULATED = {"H1", "H6", "H8", "H10", "H11", "H12", "H13", "H16", "N3", "N8", "A8", "A9", "L7", "D2", "D4", "D6",
             "D7", "X1", "X2", "X3", "X4"}  # fmt: skip


def test_every_guard_for_the_simulator_has_a_mutant_or_the_reason_why_not() -> None:
    shown = {guard for row in rows("sim.md", 6)[1:] for guard in row[0].split()}
    excused = {guard for row in rows("sim.md", 2) for guard in row[0].replace(",", " ").split()}
    assert sorted(SIMULATED - shown - excused) == []
    assert sorted(SIMULATED & shown & excused) == [], "a guard that is shown needs no reason"
