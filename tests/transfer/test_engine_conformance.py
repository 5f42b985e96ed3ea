"""The suite's hardest checks on the engines of others, and the table that docs/transports.md shows of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiesce.transfer import conformance
from quiesce.transfer.conformance import Bench, deaths, table

DOCS = Path(__file__).parents[2] / "docs"
HARD = [deaths.fence_is_final, deaths.death_of_the_poster_is_shown, deaths.no_failure_lands_late]


@pytest.mark.slow
@pytest.mark.parametrize("check", HARD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ["nixl/tcp", "nixl/cma", "mooncake/tcp"])
def test_engines_of_others_conform(engine: str, check: Callable[[Bench], None]) -> None:
    """The whole suite takes minutes: `quiesce conformance NAME`."""
    said = conformance.run(check, engine)
    fenceless = engine == "nixl/cma" and check is deaths.fence_is_final
    assert (said is not None) == fenceless, said


def report(result: str, **caps: Any) -> dict[str, Any]:
    claims = {"name": "x", "lane": "y", "fence": "peer", "fence_cost": "us", "fences_readers": True, **caps}
    checks = [{"check": "fence_is_final", "result": result}, {"check": "a_stopped_poster_is_fenced", "result": "ok"}]
    return {"capabilities": claims, "checks": checks}


FULL = json.loads((DOCS / "transports.json").read_text())["tcp"]["capabilities"]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (report("ok"), "peer"),
        (report("failed"), "none"),
        (report("not claimed"), "none"),
        (report("ok", fence="none"), "none"),
        ({**report("ok"), "checks": []}, "none"),
    ],
)
def test_a_cell_shows_what_was_measured_and_nothing_else(found: dict[str, Any], shown: str) -> None:
    claim, checks = next(
        (claim, checks) for title, claim, checks in table.ROWS if title.startswith("fence of a peer")
    )
    assert table.cell(found, claim, checks) == shown


def test_a_run_that_was_scaled_down_says_how_far_in_its_cell() -> None:
    (claim, checks) = next((claim, checks) for title, claim, checks in table.ROWS if title.startswith("10,000"))
    found = {"capabilities": {}, "checks": [{"check": checks[0], "result": "ok"}]}
    assert [table.cell({**found, **more}, claim, checks) for more in ({}, {"scale": 1.0}, {"scale": 0.05})] == [
        "yes",
        "yes",
        "yes (500)",
    ]


def test_what_was_not_run_does_not_count_as_run() -> None:
    checks = [{"check": "a", "result": result} for result in ("ok", "not claimed", "failed", "not run")]
    shown = table.table({"x/y": {**report("not run"), "capabilities": {**FULL}, "checks": checks}})
    assert shown.splitlines()[-1] == "| checks run | 2 |"


def test_every_row_of_the_table_names_checks_of_the_suite() -> None:
    known = {check.__name__ for check in conformance.CHECKS}
    assert {check for _, _, checks in table.ROWS for check in checks} <= known


def test_the_table_in_the_docs_is_what_was_measured(tmp_path: Path) -> None:
    for name in ("transports.json", "transports.md"):
        (tmp_path / name).write_bytes((DOCS / name).read_bytes())
    table.write(tmp_path, [])
    assert (tmp_path / "transports.md").read_text() == (DOCS / "transports.md").read_text()
    measured = json.loads((DOCS / "transports.json").read_text())
    assert {"shm", "tcp", "nixl/tcp", "nixl/cma", "mooncake/tcp", "mori/rdma"} <= set(measured)
    assert not measured["mori/rdma"]["checks"], "it cannot have run here"


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transports.md").write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the table"):
        table.write(tmp_path, [])
