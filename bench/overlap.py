"""`make bench-overlap`: what moving the pages costs the prefill loop, and a first token.

    python -m bench.overlap [--model NAME] [--rounds N]

One prefill worker serves two decode workers by turns, one over shm and one over `null`, which moves nothing: what it
needs more for the first is the transfer. A colocated worker has its turn too: A B C, C B A. Exit code 1: a goal
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median

from bench import load, machine
from bench.cases import Prompts
from bench.goals import Goal
from bench.overlap_cluster import WAYS, Cluster
from bench.router import cpu_by_thread
from quiesce.models.registry import DEFAULT, resolve

PROMPT = 2048  # tokens
MOST_LOSS, MOST_MS = 0.02, 10.0
MOVED = 0.0001  # CPU seconds: less than a mover takes for a page, more than one takes that sleeps


@dataclass(frozen=True)
class Asked:
    """One prompt: seconds to its first token; CPU seconds until then of the process that computed it, of the busiest
    of its threads, which is the engine's, and of its mover."""

    first: float
    cpu: float
    engine: float
    mover: float = 0.0

    @property
    def beside(self) -> float:
        """Seconds in which the engine did not compute: posts, hand-off, messages, wake-ups."""
        return self.first - self.engine

    @property
    def all(self) -> float:
        return self.cpu + self.mover


def spent(pid: int) -> dict[int, dict[str, float]]:
    """CPU seconds so far, by thread, of a process and those that it has started."""
    return {one: cpu_by_thread(one) for one in (pid, *machine.children_of(pid))}


def ask(cluster: Cluster, way: str, prompt: list[int]) -> Asked:
    """Asked and answered over `way` alone."""
    cluster.turn_to(way)
    computes = cluster.pid(WAYS[way][0])
    before, after = spent(computes), dict[int, dict[str, float]]()

    def heard() -> None:
        if not after:
            after.update(spent(computes))

    async def answered() -> float:
        begun, body = time.perf_counter(), load.completion(cluster.model, prompt, 2)
        answer = await load.post(cluster.port, "/v1/completions", body, heard)
        return load.timed(answer, begun).first

    first = asyncio.run(answered())
    own, *movers = [  # a mover is started with the first request for its peer
        [seconds - before.get(pid, {}).get(thread, 0.0) for thread, seconds in later.items()]
        for pid, later in after.items()
    ]
    asked = Asked(first, sum(own), max(own), sum(map(sum, movers)))
    if (asked.mover > MOVED) is not (way == "shm"):
        raise RuntimeError(f"{way}: the mover took {1e3 * asked.mover:.2f} ms for a prompt's pages")
    return asked


def measure(cluster: Cluster, prompts: Prompts, rounds: int) -> dict[str, list[Asked]]:
    found: dict[str, list[Asked]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in list(WAYS) if number % 2 else reversed(WAYS):
            asked = ask(cluster, way, prompts.one(PROMPT, number))
            if number:  # the first is not counted
                found[way].append(asked)
    return found


def judged(found: dict[str, list[Asked]]) -> list[Goal]:
    """Computing a prompt takes seconds, now and then a hundredth more or less, which is more than the goal: so the
    delay is told from what a first token takes beside the engine's computing."""
    rounds = list(zip(found["shm"], found["null"], found["colocated"], strict=True))
    losses = [on.all / off.all - 1 for on, off, _ in rounds]
    later = median(on.beside - alone.beside for on, _, alone in rounds)
    return [
        Goal("what the transfer costs prefill, by CPU time", median(losses), MOST_LOSS, MOST_LOSS, at_most=True),
        Goal("ms of a first token beyond colocated, computing apart", later * 1e3, MOST_MS, MOST_MS, at_most=True),
    ]


def told(found: dict[str, list[Asked]]) -> list[str]:
    lines = []
    for way, asked in found.items():
        of = {what: 1e3 * median(getattr(one, what) for one in asked) for what in ("first", "cpu", "mover", "beside")}
        text = f"{way}: first token after {of['first']:,.1f} ms, CPU {of['cpu']:,.1f}, mover {of['mover']:.1f}"
        lines.append(f"{text}; {of['beside']:,.1f} ms beside computing")
    losses = sorted(on.all / off.all - 1 for on, off in zip(found["shm"], found["null"], strict=True))
    lines.append(f"shm against null, CPU, by pairs: {', '.join(f'{100 * loss:+.1f} %' for loss in losses)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-overlap ARGS=...", description=__doc__)
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=6)
    wanted = parser.parse_args()
    if (noise := machine.noise("before the bench")) is not None:
        print(f"warning: {noise}")
    folder = resolve(wanted.model)
    with closing(Cluster(wanted.model, folder)) as cluster:
        found = measure(cluster, Prompts(folder), wanted.rounds)
    print("\n".join(told(found)))
    goals = judged(found)
    for goal in goals:
        print(goal.text())
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
