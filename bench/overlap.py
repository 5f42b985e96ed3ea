"""`make bench-overlap`: what moving the pages costs the prefill loop, and a first token.

    python -m bench.overlap [--model NAME] [--rounds N]

Three servers take turns, A B C, C B A: prefill and decode over shm, the same over `null`, which moves nothing, and
colocated. Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import load, machine
from bench.cases import Prompts
from bench.goals import Goal
from bench.router import cpu_by_thread
from bench.startup import Serve
from quiesce.models.registry import DEFAULT, resolve

PROMPT = 2048  # tokens
SIZES = ["--max-total-tokens", "16384", "--context-length", "4096"]
WAYS = {
    "shm": ["--transfer", "shm", *SIZES],
    "null": ["--transfer", "null", "--allow-unproven", *SIZES],
    "colocated": ["--colocated", *SIZES],
}
MOST_LOSS, MOST_MS = 0.02, 10.0


@dataclass(frozen=True)
class Asked:
    """One prompt: seconds to its first token; CPU seconds until then of the process that computed it, and of the
    busiest of its threads, which is the engine's."""

    first: float
    cpu: float
    engine: float

    @property
    def beside(self) -> float:
        """Seconds in which the engine did not compute: posts, hand-off, messages, wake-ups."""
        return self.first - self.engine


class Way:
    def __init__(self, model: str, name: str, stack: ExitStack) -> None:
        self.name, self._model = name, model
        self._serve = stack.enter_context(Serve(model, WAYS[name]))
        self._serve.first_answer()
        workers = machine.workers_of(self._serve.pid)
        self._computes = workers["colocated" if name == "colocated" else "prefill"]

    def ask(self, prompt: list[int]) -> Asked:
        before, after = cpu_by_thread(self._computes), dict[str, float]()

        def heard() -> None:
            if not after:
                after.update(cpu_by_thread(self._computes))

        async def answered() -> float:
            begun, body = time.perf_counter(), load.completion(self._model, prompt, 2)
            answer = await load.post(self._serve.port, "/v1/completions", body, heard)
            return load.timed(answer, begun).first

        first = asyncio.run(answered())
        spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
        return Asked(first, sum(spent), max(spent))


def measure(model: str, folder: Path, rounds: int) -> dict[str, list[Asked]]:
    prompts = Prompts(folder)
    with ExitStack() as stack:
        ways = [Way(model, name, stack) for name in WAYS]
        found: dict[str, list[Asked]] = {way.name: [] for way in ways}
        for number in range(rounds + 1):
            for way in ways if number % 2 else ways[::-1]:
                asked = way.ask(prompts.one(PROMPT, number))
                if number:  # the first is not counted
                    found[way.name].append(asked)
    return found


def judged(found: dict[str, list[Asked]]) -> list[Goal]:
    """Computing a prompt takes seconds, now and then a hundredth more or less, which is more than the goal: so the
    delay is told from what a first token takes beside the engine's computing."""
    rounds = list(zip(found["shm"], found["null"], found["colocated"], strict=True))
    loss = median(on.cpu / off.cpu - 1 for on, off, _ in rounds)
    later = median(on.beside - alone.beside for on, _, alone in rounds)
    return [
        Goal("what the transfer costs prefill, by CPU time", loss, MOST_LOSS, MOST_LOSS, at_most=True),
        Goal("ms of a first token beyond colocated, computing apart", later * 1e3, MOST_MS, MOST_MS, at_most=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-overlap ARGS=...", description=__doc__)
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    wanted = parser.parse_args()
    if (noise := machine.noise("before the bench")) is not None:
        print(f"warning: {noise}")
    found = measure(wanted.model, resolve(wanted.model), wanted.rounds)
    for name, asked in found.items():
        first, cpu, beside = (
            1e3 * median(getattr(one, what) for one in asked) for what in ("first", "cpu", "beside")
        )
        print(f"{name}: first token after {first:,.1f} ms, CPU {cpu:,.1f}; {beside:,.1f} ms beside computing")
    goals = judged(found)
    for goal in goals:
        print(goal.text())
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
