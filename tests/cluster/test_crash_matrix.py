"""Every role killed, stopped for short and for long, and restarted, while a request is queued, under way, landed and
decoding. What each cell must show is in `quiesce.lab.crash`; other engines are in `test_engines.py`, and `make soak`
runs ten rounds."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cells import ACTIONS, CELLS, STATES, VICTIMS, Cell
from quiesce.lab.crash import SLACK, CellError, Matrix
from quiesce.lab.patient import PAIR, PREFILL, PatientRouter
from quiesce.roles.prefill_peers import UNREACHABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def matrix(tiny: Path, oracle: Callable[..., list[list[int]]]) -> Iterator[Matrix]:
    """One pair of workers for all cells; a cell replaces what it kills."""
    folder = Path(tempfile.mkdtemp(prefix="qs-"))
    with PatientRouter(tiny, folder, hold_timeout=4.0) as cluster:
        yield Matrix(cluster, oracle, slack=SLACK)
    shutil.rmtree(folder, ignore_errors=True)


def marked(cell: Cell) -> object:
    """What each action costs mid-transfer, and each death in every state; the rest takes minutes."""
    short = cell.state == "mid-transfer" or (cell.action == "kill" and cell.victim in ("prefill", "decode"))
    return pytest.param(cell, id=str(cell), marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize("cell", [*map(marked, CELLS)])
def test_who_waits_is_told_or_answered_and_nothing_is_left(matrix: Matrix, cell: Cell) -> None:
    try:
        matrix.run(cell)
    except (CellError, TimeoutError, RuntimeError):
        matrix.repair()
        raise


def test_the_matrix_is_whole() -> None:
    assert len(set(CELLS)) == len(VICTIMS) * len(ACTIONS) * len(STATES) == 64


def test_a_prefill_that_is_stopped_before_its_first_session_costs_no_request(
    tiny: Path, run_dir: Path, oracle: Callable[..., list[list[int]]]
) -> None:
    """It accepts the connection, because its kernel does, and says nothing for longer than a dead one is given."""
    prompt = list(range(10, 60))
    with PatientRouter(tiny, run_dir, hold_timeout=20.0) as cluster:
        for name in PAIR:
            cluster.spawn(name.partition("-")[0], name, max_total_tokens=1024)
        cluster.wait_for(*PAIR)
        cluster.kill(PREFILL, signal.SIGSTOP)
        request = cluster.start(prompt, Sampling(max_tokens=8, ignore_eos=True), PAIR)
        cluster.until_time(UNREACHABLE + 3.0)  # also longer than a listener waits for a handshake
        assert not request.told
        cluster.kill(PREFILL, signal.SIGCONT)
        cluster.until(lambda: request.over, 30, "the answer")
        assert request.outcome == "length", request.ends
        assert request.tokens == oracle([prompt], 8)[0]
