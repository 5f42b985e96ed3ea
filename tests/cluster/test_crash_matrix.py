"""Every role killed, stopped for short and for long, and restarted, while a request is queued, under way, landed and
decoding. What each cell must show is in `quiesce.lab.crash`; `make soak` runs ten rounds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.lab.crash import ACTIONS, CELLS, STATES, VICTIMS, Cell, CellError, Matrix
from quiesce.lab.patient import PatientRouter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def matrix(tiny: Path, oracle: Callable[..., list[list[int]]]) -> Iterator[Matrix]:
    """One pair of workers for all cells; a cell replaces what it kills."""
    folder = Path(tempfile.mkdtemp(prefix="qs-"))
    with PatientRouter(tiny, folder, hold_timeout=2.0) as cluster:
        yield Matrix(cluster, oracle)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_who_waits_is_told_or_answered_and_nothing_is_left(matrix: Matrix, cell: Cell) -> None:
    try:
        matrix.run(cell)
    except (CellError, TimeoutError, RuntimeError):
        matrix.repair()
        raise


def test_the_matrix_is_whole() -> None:
    assert len(set(CELLS)) == len(VICTIMS) * len(ACTIONS) * len(STATES) == 64
