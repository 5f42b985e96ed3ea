"""`make bench-transfer`: our transport layer beside a bare loop on the same engine, with the same page lists.

    python -m bench.transfer [ENGINE ...] [--pairs N] [--json FILE]

Poster and lender have a core each. The two sides of a comparison take turns, A B, B A; a ratio is the median over the
pairs. Beside the share of the bare loop's bandwidth stands the same by CPU time, of both processes and their helpers:
where others use the machine too, that is the steadier figure. Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.bare import BARE, Bare, Pages
from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer import registry
from quiesce.transfer.arena import shared_arena

SMALL, BIG = 23 << 10, 64 << 20  # bytes of a page
POOL = 7000
CROWD, CROWD_PAGES = 32, 200  # prompts of 3,200 tokens
OWN, THEIR = 0, 1  # cores
PATIENCE = 30.0
SHARE = {"shm": 0.90, "tcp": 0.90}  # of the bare loop's bandwidth; others:
SHARE_OF_OTHERS = 0.95
MICROSECONDS = {"shm": 100.0, "tcp": 200.0}  # from a post of one page until the owner is told
LATENCIES = 2000


@dataclass(frozen=True)
class Case:
    name: str
    pages: int
    page_bytes: int
    transfers: Pages

    @property
    def bytes(self) -> int:
        return self.page_bytes * sum(len(own) for own, _ in self.transfers)


def cases() -> list[Case]:
    draw = random.Random(23)
    scattered = [(draw.sample(range(POOL), 2000), draw.sample(range(POOL), 2000))]
    targets = draw.sample(range(POOL), CROWD * CROWD_PAGES)
    starts = range(0, len(targets), CROWD_PAGES)
    crowd = [(draw.sample(range(POOL), CROWD_PAGES), targets[at : at + CROWD_PAGES]) for at in starts]
    return [
        Case("2,000 pages of 23 KiB", POOL, SMALL, scattered),
        Case("32 transfers at once of 200 pages of 23 KiB", POOL, SMALL, crowd),
        Case("one block of 64 MiB", 2, BIG, [([0], [1])]),
    ]


class Layer:
    """A poster here and a lender in a process of its own."""

    def __init__(self, engine: str, run_dir: Path, pages: int, page_bytes: int) -> None:
        self._epoch = secrets.randbits(62) | 1
        epoch = secrets.randbits(62) | 1
        words = [engine, str(run_dir), str(epoch), str(pages), str(page_bytes), str(THEIR)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_lender", "layer", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        setup = registry.Setup(run_dir=run_dir, epoch=self._epoch, max_transfer_pages=256)
        os.sched_setaffinity(0, {THEIR})  # what the engine starts to do the copying does not share our core
        self._transport = registry.make(engine, setup)
        arena = shared_arena(pages, page_bytes)
        arena.pages[:] = 1
        self._transport.register(arena)
        self._peer = self._transport.connect(bytes.fromhex(self.ask("descriptor", self._epoch)), self._epoch)
        os.sched_setaffinity(0, {OWN})
        self._poller = select.poll()
        self._poller.register(self._transport.fileno(), select.POLLIN)

    def ask(self, name: str, *values: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        return json.loads(self._process.stdout.readline())

    def lend(self, pages: list[int]) -> Grant:
        """Waits until the poster has attached."""
        deadline = time.monotonic() + PATIENCE
        while (generation := self.ask("lend", self._epoch, pages)) is None:
            self._transport.poll()
            self._transport.events()
            if time.monotonic() > deadline:
                raise RuntimeError("the two did not get together")
            time.sleep(0.01)
        return Grant(0, generation, tuple(pages))

    def move(self, transfers: Pages, grants: list[Grant]) -> None:
        transport = self._transport
        waiting = {
            transport.write(self._peer, own, theirs, grant).id
            for (own, theirs), grant in zip(transfers, grants, strict=True)
        }
        while waiting:
            if not self._poller.poll(PATIENCE * 1000):
                raise RuntimeError(f"{len(waiting)} posts did not end within {PATIENCE:.0f} s")
            for post, outcome in transport.poll():
                if outcome is not Outcome.PLACED:
                    raise RuntimeError(f"a post ended {outcome.value}")
                waiting.discard(post.id)

    def close(self) -> None:
        self._transport.close_all()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu_seconds() -> float:
    """Of this process and all that it has started, to the nanosecond; they outlive the measurement."""
    pids, found = [os.getpid()], 0
    while pids:
        pid = pids.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += int((task / "schedstat").read_text().split()[0])
            pids += map(int, (task / "children").read_text().split())
    return found / 1e9


def compare(case: Case, layer: Layer, bare: Bare, pairs: int) -> dict[str, Any]:
    grants = [layer.lend(theirs) for _, theirs in case.transfers]
    sides: list[Callable[[], None]] = [
        lambda: layer.move(case.transfers, grants),
        lambda: bare.move(case.transfers),
    ]
    for side in sides * 2:
        side()  # first touches
    took: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    for turn in range(pairs):
        wall, spent = [0.0, 0.0], [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            before = cpu_seconds()
            wall[side] = seconds(sides[side])
            spent[side] = cpu_seconds() - before
        took.append((wall[0], wall[1]))
        cpu.append((spent[0], spent[1]))
    return {
        "case": case.name,
        "layer_gb_s": case.bytes / median(ours for ours, _ in took) / 1e9,
        "bare_gb_s": case.bytes / median(theirs for _, theirs in took) / 1e9,
        "share": median(theirs / ours for ours, theirs in took),
        "cpu_share": median(theirs / ours for ours, theirs in cpu),
        "pairs": pairs,
    }


def latency(layer: Layer) -> float:
    """Microseconds from a post of one page until the owner is told, at the median."""
    grant = [layer.lend([7])]
    took = [seconds(lambda: layer.move([([3], [7])], grant)) for _ in range(LATENCIES)]
    return median(took[LATENCIES // 10 :]) * 1e6


def measure(engine: str, pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {"engine": engine, "cases": []}
    with tempfile.TemporaryDirectory(prefix="qb-") as folder:
        for page_bytes in (SMALL, BIG):
            fitting = [case for case in cases() if case.page_bytes == page_bytes]
            pages = fitting[0].pages
            layer = Layer(engine, Path(folder), pages, page_bytes)
            make = BARE.get(engine)
            bare = make(pages, page_bytes, THEIR) if make is not None else None
            try:
                if page_bytes == SMALL:
                    found["latency_us"] = latency(layer)
                if bare is not None:
                    found["cases"] += [compare(case, layer, bare, pairs) for case in fitting]
            finally:
                layer.close()
                if bare is not None:
                    bare.close()
    return found


def judge(found: dict[str, Any]) -> list[str]:
    """Prints what was found, with goals; those that are missed."""
    engine = found["engine"]
    goal = SHARE.get(engine, SHARE_OF_OTHERS)
    missed = []
    for case in found["cases"]:
        met = case["share"] >= goal
        print(
            f"{engine:<10} {case['case']:<46} {case['layer_gb_s']:6.2f} GB/s  bare {case['bare_gb_s']:6.2f} GB/s  "
            f"{case['share']:6.1%} of it (CPU {case['cpu_share']:.1%})  goal {goal:.0%} {'met' if met else 'MISSED'}"
        )
        missed += [] if met else [f"{engine}: {case['case']}"]
    most = MICROSECONDS.get(engine)
    met = most is None or found["latency_us"] <= most
    word = "" if most is None else f"  goal {most:.0f} us {'met' if met else 'MISSED'}"
    what = "one page of 23 KiB, from post to told"
    print(f"{engine:<10} {what:<46} {found['latency_us']:6.0f} us{word}", flush=True)
    return missed + ([] if met else [f"{engine}: latency"])


def main() -> int:
    options = argparse.ArgumentParser(prog="bench.transfer", description=__doc__.splitlines()[0])
    options.add_argument("engines", nargs="*", default=["shm", "tcp"])
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("bench.transfer needs two cores, one for either process", file=sys.stderr)
        return 2
    globals().update(OWN=cores[0], THEIR=cores[1])
    os.sched_setaffinity(0, {OWN})
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"the machine is not quiet: load average {load:.1f}", file=sys.stderr)
    results: list[dict[str, Any]] = []
    missed: list[str] = []
    for engine in asked.engines:
        results.append(measure(engine, asked.pairs))
        missed += judge(results[-1])
    if asked.json:
        asked.json.write_text(json.dumps({"results": results, "missed": missed, "load": os.getloadavg()}))
    for what in missed:
        print(f"missed: {what}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
