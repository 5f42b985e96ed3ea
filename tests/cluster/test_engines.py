"""The abort storm and the crash matrix on every engine, in both directions: a short part of each here, all of it with
`-m long` and in `make soak`. Where engines differ stands in `quiesce.lab.cells`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.lab.cells import CELLS, Cell, Lane
from quiesce.lab.crash import SLACK, Matrix
from quiesce.lab.patient import DECODE, PAIR, PatientRouter
from quiesce.lab.storm import Plan
from quiesce.lab.storms import WORDS, events, storm, storm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Oracle = Callable[..., list[list[int]]]

PUSH = [Lane(name, "push") for name in ("tcp", "nixl/tcp", "nixl/cma", "mooncake/tcp")]
PULL = [Lane(name, "pull") for name in ("tcp", "nixl/tcp", "mooncake/tcp")]
OTHERS = [Lane("shm", "pull"), Lane("nixl/cma", "pull")]  # in their own tests, or in the long ones only
SHORT = {
    "push": ("prefill-kill-mid-transfer", "decode-kill-mid-transfer", "prefill-stop-long-mid-transfer"),
    "pull": (),
}
PATIENT = 20.0  # seconds that the router waits for a heartbeat while a storm rages on a busy machine
LOST = 0.02  # share of the outcomes that get lost, where some do


def ordeals() -> Iterator[object]:
    """(lane, cell, or None for a storm): by lane, so that one pair of workers lives through all of a lane's."""
    for lane in (*PUSH, *PULL, *OTHERS):
        yield pytest.param(lane, None, id=f"{lane}-storm", marks=[pytest.mark.long] if lane in OTHERS else [])
        for cell in lane.cells:
            short = lane not in OTHERS and str(cell) in SHORT[lane.direction]
            yield pytest.param(lane, cell, id=f"{lane}-{cell}", marks=[] if short else [pytest.mark.long])


@pytest.fixture(scope="module")
def pair_of(tiny: Path, oracle: Oracle) -> Iterator[Callable[[Lane], Matrix]]:
    """One pair of workers at a time, which lives for as long as the lane is the same."""
    with contextlib.ExitStack() as stack:
        living: dict[Lane, Matrix] = {}

        def of(lane: Lane) -> Matrix:
            if lane not in living:
                living.clear()
                stack.close()
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qs-", ignore_cleanup_errors=True))
                settings = {"transfer": lane.transfer, "direction": lane.direction}
                cluster = stack.enter_context(PatientRouter(tiny, Path(folder), hold_timeout=4.0, **settings))
                living[lane] = Matrix(cluster, oracle, slack=SLACK)
            return living[lane]

        yield of


@pytest.mark.parametrize(("lane", "cell"), [*ordeals()])
def test_who_waits_is_told_or_answered_right_and_nothing_is_left(
    pair_of: Callable[[Lane], Matrix], lane: Lane, cell: Cell | None, oracle: Oracle
) -> None:
    matrix = pair_of(lane)
    before = matrix.cluster.inspect(DECODE)
    try:
        _storm(matrix, oracle) if cell is None else matrix.run(cell)
    except (AssertionError, TimeoutError, RuntimeError):
        matrix.repair()
        raise
    if str(cell) == "prefill-kill-mid-transfer" and matrix.lane.direction == "push":
        _counted_as_what_it_was(matrix, before)


def _storm(matrix: Matrix, oracle: Oracle) -> None:
    """Survivors equal the oracle, and every hold ends by the borrower's own word."""
    cluster, before = matrix.cluster, matrix.cluster.hold
    cluster.hold = PATIENT
    found = storm(cluster, oracle, Plan(requests=60), may_fail=False, seconds=120)
    cluster.hold = before
    assert found.wrong == []
    assert found.report.survivors > 20
    assert set(found.closed["decode"]) | set(found.closed["prefill"]) <= WORDS
    if matrix.lane.transfer != "tcp":  # it counts no pages
        assert events(cluster.inspect(matrix.lane.poster), "placed_pages") > 50, "the pages went another way"
    for name in PAIR:
        peers = cluster.inspect(name)["transport"]["peers"]
        assert all(how.startswith(f"{matrix.lane.transfer}:") for how in peers.values()), peers
        told = cluster.workers[name].transfers  # as /health shows it
        assert told == (f"{matrix.lane.transfer}: the only one here (1 peer)",), told


def _counted_as_what_it_was(matrix: Matrix, before: dict) -> None:  # type: ignore[type-arg]
    """Nobody was left to say that nothing more lands."""
    after = matrix.cluster.inspect(DECODE)
    more = {kind: after["closed_by"].get(kind, 0) - before["closed_by"].get(kind, 0) for kind in ("gone", "fenced")}
    if matrix.lane.transfer == "nixl/cma":  # the writer copies by itself: only its death proves anything, and it does
        assert more == {"gone": 1, "fenced": 0}
    elif matrix.lane.transfer == "tcp":  # its bytes may wait in our own kernel: the gate is shut
        assert more == {"gone": 0, "fenced": 1}
    else:  # bytes may still be under way to the agent that it wrote to, so that one has ended
        assert more == {"gone": 0, "fenced": 1}
        assert events(after, "agents_ended") > events(before, "agents_ended")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [0.0, LOST], ids=["", "outcomes get lost"])
@pytest.mark.parametrize("lane", [Lane("shm", "push"), *PUSH, *PULL, *OTHERS], ids=str)
def test_a_storm_of_a_thousand(lane: Lane, lost: float, tiny: Path, run_dir: Path, oracle: Oracle) -> None:
    """With lost outcomes transfers are tainted, and a fence may hit others: they fail with a reason."""
    with storm_cluster(tiny, run_dir, transfer=lane.transfer, direction=lane.direction, lose=lost) as cluster:
        found = storm(cluster, oracle, Plan(requests=1000), may_fail=lost > 0)
    assert found.wrong == []
    assert found.report.survivors > (200 if lost else 400)
    assert lost or set(found.closed["decode"]) | set(found.closed["prefill"]) <= WORDS


def test_a_lane_without_a_mover_has_no_cells_for_it() -> None:
    assert len(Lane("shm", "push").cells) == len(CELLS) == 64
    assert len(Lane("nixl/tcp", "pull").cells) == 48
