"""Starts engines in processes of their own on one core, and takes their windows turn by turn."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.cases import Case
from bench.report import Window

DEADLINE = 180.0  # seconds for any one answer; a window takes about one
ENOUGH = 0.92  # share of the core below which a window was disturbed and is taken again
ROOT = Path(__file__).parent.parent


class Pinned:
    """A subject of bench.offline on `core`. Only the one that was asked runs; the others wait in a read."""

    def __init__(self, subject: str, folder: Path, dtype: str, core: int) -> None:
        self.subject = subject
        command = [sys.executable, "-m", "bench.offline", subject, str(folder), dtype, str(core)]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ
            | one_thread
            | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Pinned:
        self.answer()  # loaded
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"gave no answer within {DEADLINE:.0f} s"
            raise RuntimeError(f"the {self.subject} process {what}; its own messages are above")
        return dict(json.loads(line))

    def window(self, case: Case) -> Window:
        reply = self.ask(do="window", case=case.name)
        return Window(case.tokens, reply["wall"], reply["cpu"], reply["tokens"])


def interleave(subjects: list[Pinned], case: Case, rounds: int) -> dict[str, list[Window]]:
    """`rounds` windows of each subject, in turn, after one of each that is not counted.

    A window that was disturbed is taken once more while the case's allowance lasts, and the less disturbed stays.
    """
    for subject in subjects:
        subject.ask(do="prepare", case=case.name)
        subject.window(case)
    taken: dict[str, list[Window]] = {subject.subject: [] for subject in subjects}
    allowance = rounds
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else subjects[::-1]:
            window = subject.window(case)
            if window.core_share < ENOUGH and allowance:
                allowance -= 1
                window = max(window, subject.window(case), key=lambda one: one.core_share)
            taken[subject.subject].append(window)
    return taken
