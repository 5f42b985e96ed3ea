"""The abort storm, then rounds of the crash matrix, on one engine: `python -m quiesce.lab.rounds MODEL`.

A line for each storm, with how the transfers that were given up got free, and a line for each cell.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from quiesce.core.messages import Sampling
from quiesce.lab.cells import Cell, Direction
from quiesce.lab.cluster import Oracle
from quiesce.lab.crash import CellError, Matrix
from quiesce.lab.patient import CHUNK, PAGE, PatientRouter
from quiesce.lab.storm import Plan
from quiesce.lab.storms import storm, storm_cluster

LOST = 0.02  # share of the outcomes that the second storm loses


def rounds(matrix: Matrix, count: int, only: str = "") -> Iterator[tuple[int, Cell, float, str]]:
    """(round, cell, seconds, what was wrong or "")."""
    for number in range(count):
        for cell in [cell for cell in matrix.lane.cells if only in str(cell)]:
            began = time.monotonic()
            trouble = ""
            try:
                matrix.run(cell)
            except (CellError, TimeoutError, RuntimeError) as error:
                trouble = str(error)
                matrix.repair()
            yield number, cell, time.monotonic() - began, trouble


def main() -> int:
    asked = _asked()
    oracle = oracle_of(asked.model)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="qs-") as name:
        folder, log = Path(name), Path(f"{name}.log")
        for lose in (0.0, LOST) if asked.storm else ():
            wrong += _storm(asked, folder / f"{lose}", lose, oracle)
        if asked.rounds:
            wrong += _rounds(asked, folder / "m", log, oracle)
    print(f"{wrong} faults; the workers' log is {log}")
    return 1 if wrong else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m quiesce.lab.rounds", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a small model")
    parser.add_argument("--transfer", default="shm", help="shm, tcp, nixl/tcp, nixl/cma, mooncake/tcp")
    parser.add_argument("--direction", choices=["push", "pull"], default="push")
    parser.add_argument("--storm", type=int, default=0, help="requests of the storm before; 0: none")
    parser.add_argument("--rounds", type=int, default=10, help="times that each cell is run")
    parser.add_argument("--hold-timeout", type=float, default=2.0, help="of the cells, in seconds")
    parser.add_argument("--only", default="", help="part of the names of the cells to run")
    return parser.parse_args()


def oracle_of(model: Path) -> Oracle:
    """The answers of one process alone."""
    from quiesce.engine.engine import Engine  # noqa: PLC0415
    from quiesce.engine.local import LocalEngine  # noqa: PLC0415

    local = LocalEngine(Engine(model, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True))

    def oracle(prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
        sampling = [Sampling(max_tokens=tokens, ignore_eos=True)] * len(prompts)
        return local.generate(prompts, sampling, chunk=CHUNK, concurrency=4)

    return oracle


def _storm(asked: argparse.Namespace, folder: Path, lose: float, oracle: Oracle) -> int:
    folder.mkdir()
    direction: Direction = asked.direction
    with storm_cluster(asked.model, folder, transfer=asked.transfer, direction=direction, lose=lose) as cluster:
        found = storm(cluster, oracle, Plan(requests=asked.storm), may_fail=lose > 0, seconds=1800)
    print(f"storm{f', {lose:.0%} of the outcomes lost' if lose else ''}: {found.line()}", flush=True)
    for line in found.wrong:
        print(f"  WRONG: {line}", flush=True)
    return len(found.wrong)


def _rounds(asked: argparse.Namespace, folder: Path, log: Path, oracle: Oracle) -> int:
    folder.mkdir()
    settings = {"transfer": asked.transfer, "direction": asked.direction}
    failed = 0
    with PatientRouter(asked.model, folder, log, hold_timeout=asked.hold_timeout, **settings) as cluster:
        for number, cell, seconds, trouble in rounds(Matrix(cluster, oracle), asked.rounds, asked.only):
            failed += bool(trouble)
            print(f"{number:3d} {cell!s:32} {seconds:5.1f} s  {trouble or 'ok'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
