"""Starts engines in processes of their own on one core, and takes their windows turn by turn."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from bench.cases import Case, Prompts
from bench.machine import core_seconds
from bench.peers import OFFLINE, ONE_THREAD, ROOT, Peer
from bench.report import Window

DEADLINE = 900.0  # seconds for any one answer; vLLM warms up before its first, for minutes on a slow core
LONGEST, FEWEST = (
    240.0,
    3,
)  # seconds for the rounds of a case: where an engine is slow there are fewer, not below three
ENOUGH = 0.92  # share of the core below which a window was disturbed and is taken again


class Turns(Protocol):
    """What `interleave` needs of an engine."""

    name: str

    def window(self, case: Case, prompts: list[list[int]]) -> Window: ...


class Pinned:
    """A peer's process group on `core`. Only the one that was asked runs; the others are stopped: some would spin."""

    def __init__(self, peer: Peer, model: Path, dtype: str, core: int, patience: float = DEADLINE) -> None:
        """`patience`: seconds for any one answer."""
        self.name, self._patience = peer.name, patience
        command = ["taskset", "-c", str(core), str(peer.python), "-m", "bench.offline", peer.module]
        bound = {"VLLM_CPU_OMP_THREADS_BIND": str(core)} if peer.module == "bench.peers.vllm_llm" else {}
        self._process = subprocess.Popen(
            [*command, str(model), peer.dtype or dtype, *peer.options],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | OFFLINE | peer.environment | bound,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def __enter__(self) -> Pinned:
        try:
            self._answer()  # loaded
        except BaseException:
            self.__exit__()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def window(self, case: Case, prompts: list[list[int]]) -> Window:
        self._signal(signal.SIGCONT)
        try:
            self._ask({"kind": case.kind, "prompts": prompts, "steps": case.steps})
            before = core_seconds(self._process.pid)
            reply = self._ask({})
            cpu = core_seconds(self._process.pid) - before
        finally:
            self._signal(signal.SIGSTOP)
        tokens = reply["tokens"]
        count = case.prompt if case.kind == "prefill" else sum(map(len, tokens))
        return Window(count, reply["wall"], cpu, tokens)

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._patience)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"gave no answer within {self._patience:.0f} s"
            raise RuntimeError(f"the {self.name} process {what}; its own messages are above")
        return dict(json.loads(line))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def interleave(
    subjects: list[Turns], case: Case, prompts: Prompts, rounds: int, lost: Callable[[str], None]
) -> dict[str, list[Window]]:
    """At most `rounds` windows of each subject, in turn, after one of each that is not counted, of whole requests a
    short one.

    A window that was disturbed is taken once more while the case's allowance lasts, and the less disturbed stays. A
    subject other than Quiesce that fails leaves `subjects`, and `lost` is told of it.
    """
    first = replace(case, steps=min(case.steps, 8)) if case.kind == "requests" else case
    taken: dict[str, list[Window]] = {subject.name: [] for subject in subjects}
    allowance = rounds

    def one(subject: Turns, what: Case, number: int) -> Window | None:
        try:
            return subject.window(what, prompts.of(what, number))
        except (RuntimeError, OSError) as error:  # OSError: nobody reads what it is asked any more
            if subject.name.startswith("quiesce"):
                raise
            subjects.remove(subject)
            del taken[subject.name]
            lost(f"{subject.name} in {case.name}: {error}")
            return None

    warm = [one(subject, first, 0) for subject in subjects[:]]
    rounds = min(rounds, max(FEWEST, int(LONGEST / sum(window.wall for window in warm if window))))
    for number in range(1, rounds + 1):
        for subject in subjects[:] if number % 2 else subjects[::-1]:
            window = one(subject, case, number)
            if window and window.core_share < ENOUGH and allowance:
                allowance -= 1
                if again := one(subject, case, number):
                    window = max(window, again, key=lambda one: one.core_share)
            if window and subject in subjects:
                taken[subject.name].append(window)
    return taken
