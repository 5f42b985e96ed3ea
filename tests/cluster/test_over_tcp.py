"""The abort storm and crashes with the hand-off over tcp, in both directions.

Not every cell of the crash matrix exists here: a decode worker that is stopped places nothing, so that nothing can be
"landed" beside it, and prefill's posts to it stay open, with their pages, until it goes on or is dead.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.lab.cluster import Cluster
from quiesce.lab.crash import CELLS, Cell, CellError, Matrix
from quiesce.lab.idle import not_idle
from quiesce.lab.patient import PatientRouter
from quiesce.lab.storm import Plan, run
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 16}
PREFILLS = ("prefill-0", "prefill-1")
HERE = [
    cell
    for cell in CELLS
    if cell.victim in ("prefill", "decode")
    and cell.state == "mid-transfer"
    and (cell.victim, cell.action) != ("decode", "stop long")
]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_storm_survivors_equal_the_oracle_and_every_hold_ends_by_proof(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]], direction: str
) -> None:
    settings = {"transfer": "tcp", "direction": direction, "max_transfer_pages": 2, "context_length": 144}
    with Cluster(tiny, run_dir, hold_timeout=5.0, **settings, **SIZES) as cluster:
        for number, (name, pace) in enumerate(zip(PREFILLS, ((3.0, 20.0), (0.0, 0.5)), strict=True)):
            cluster.spawn("prefill", name, Faults(seed=number, ms_per_page=pace), max_total_tokens=2048)
        cluster.spawn("decode", "decode-0", max_total_tokens=288)
        cluster.wait_for(*PREFILLS, "decode-0")
        run(cluster, PREFILLS, "decode-0", oracle, Plan(requests=4, cut_share=0.0))
        boot = {name: cluster.inspect(name) for name in cluster.workers}
        report = run(cluster, PREFILLS, "decode-0", oracle, Plan(requests=150), seconds=200)
        assert not report.corrupted, f"{len(report.corrupted)} answers differ from the oracle"
        assert not report.failed, [request.ends for request in report.failed[:3]]
        assert report.many_ends == 0 and report.survivors > 60
        for name in cluster.workers:
            cluster.until(lambda name=name: not not_idle(cluster.inspect(name), boot[name]), 7, f"{name} to be idle")
        decode = cluster.inspect("decode-0")
        assert set(decode["closed_by"]) <= {"completed", "drained", "never_started"} and decode["unsound"] == 0
        assert set(decode["transport"]["peers"].values()) == {"tcp: the only one here"}


@pytest.fixture(scope="module")
def matrix(tiny: Path, oracle: Callable[..., list[list[int]]]) -> Iterator[Matrix]:
    folder = Path(tempfile.mkdtemp(prefix="qs-"))
    with PatientRouter(tiny, folder, hold_timeout=2.0, transfer="tcp") as cluster:
        yield Matrix(cluster, oracle)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("cell", HERE, ids=str)
def test_who_waits_is_told_or_answered_and_nothing_is_left(matrix: Matrix, cell: Cell) -> None:
    try:
        matrix.run(cell)
    except (CellError, TimeoutError, RuntimeError):
        matrix.repair()
        raise
