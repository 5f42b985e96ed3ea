"""`make bench-transfer`: our transport layer beside a bare loop on the same engine, with the same page lists.

    python -m bench.transfer [ENGINE ...] [--only FIGURE] [--pairs N] [--json FILE]
    python -m bench.transfer --table FILE

Poster and lender have a core each. The two sides of a comparison take turns, A B, B A; a ratio is the median over the
pairs. They are taken in several set-ups, each with memory of its own, one side's made first and then the other's, for
where a pool lies decides about a tenth of its speed. Beside the share of the bare loop's bandwidth stands the same by
CPU time, of both processes and their helpers: where others use the machine too, that is the steadier figure. Exit
code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import transfer_report as report
from bench.bare import BARE, Bare, Pages
from bench.machine import describe
from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer import registry
from quiesce.transfer.arena import shared_arena

SMALL, BIG = 23 << 10, 64 << 20  # bytes of a page
POOL = 7000
CROWD, CROWD_PAGES = 32, 200  # prompts of 3,200 tokens
OWN, THEIR = 0, 1  # cores
PATIENCE = 30.0
SETUPS = 4  # fewer where there are fewer pairs
LATENCIES, FEWEST, LONGEST = 2000, 100, 15.0  # single pages; how many are enough once so many seconds are over


LATENCY = "latency"
KEYS = ("pages", "crowd", "block")


@dataclass(frozen=True)
class Case:
    key: str
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
        Case("pages", "2,000 pages of 23 KiB", POOL, SMALL, scattered),
        Case("crowd", "32 transfers at once of 200 pages of 23 KiB", POOL, SMALL, crowd),
        Case("block", "one block of 64 MiB", 2, BIG, [([0], [1])]),
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
        os.sched_setaffinity(
            0, {THEIR if engine == "shm" else OWN}
        )  # its mover alone copies; threads are the poster's
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


@dataclass
class Pairs:
    """What (layer, bare) took, in seconds of the clock and of the processor."""

    took: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)

    def figures(self, case: Case) -> dict[str, Any]:
        return {
            "key": case.key,
            "case": case.name,
            "layer_gb_s": case.bytes / median(ours for ours, _ in self.took) / 1e9,
            "bare_gb_s": case.bytes / median(theirs for _, theirs in self.took) / 1e9,
            "share": median(theirs / ours for ours, theirs in self.took),
            "cpu_share": median(theirs / ours for ours, theirs in self.cpu),
            "pairs": len(self.took),
        }


def compare(case: Case, layer: Layer, bare: Bare, pairs: int, into: Pairs) -> None:
    grants = [layer.lend(theirs) for _, theirs in case.transfers]
    sides: list[Callable[[], None]] = [
        lambda: layer.move(case.transfers, grants),
        lambda: bare.move(case.transfers),
    ]
    for side in sides * 2:
        side()  # first touches
    for turn in range(pairs):
        wall, spent = [0.0, 0.0], [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            before = cpu_seconds()
            wall[side] = seconds(sides[side])
            spent[side] = cpu_seconds() - before
        into.took.append((wall[0], wall[1]))
        into.cpu.append((spent[0], spent[1]))


def latency(layer: Layer) -> float:
    """Microseconds from a post of one page until the owner is told, at the median."""
    grant = [layer.lend([7])]
    until = time.monotonic() + LONGEST
    took: list[float] = []
    while len(took) < LATENCIES and (len(took) < FEWEST or time.monotonic() < until):
        took.append(seconds(lambda: layer.move([([3], [7])], grant)))
    return median(took[len(took) // 10 :]) * 1e6


def measure(engine: str, pairs: int, only: set[str]) -> dict[str, Any]:
    """`only`: keys of cases, and LATENCY."""
    found: dict[str, Any] = {"engine": engine, "cases": [], "latency_us": None}
    setups = min(SETUPS, pairs)
    with tempfile.TemporaryDirectory(prefix="qb-") as folder:
        if LATENCY in only:
            layer = Layer(engine, Path(folder), POOL, SMALL)
            found["latency_us"] = latency(layer)
            layer.close()
        for page_bytes in (SMALL, BIG):
            asked = [case for case in cases() if case.page_bytes == page_bytes and case.key in only]
            taken = {case.key: Pairs() for case in asked}
            for number in range(setups if asked else 0):
                share = pairs * (number + 1) // setups - pairs * number // setups
                with both(engine, Path(folder), asked[0].pages, page_bytes, bool(number % 2)) as (layer, bare):
                    for case in asked:
                        compare(case, layer, bare, share, taken[case.key])
            found["cases"] += [taken[case.key].figures(case) for case in asked]
    return found


@contextlib.contextmanager
def both(engine: str, folder: Path, pages: int, page_bytes: int, bare_first: bool) -> Iterator[tuple[Layer, Bare]]:
    with contextlib.ExitStack() as open_ones:
        made: dict[bool, Any] = {}
        for is_bare in (bare_first, not bare_first):
            one: Any = BARE[engine](pages, page_bytes, THEIR) if is_bare else Layer(engine, folder, pages, page_bytes)
            made[is_bare] = one
            open_ones.callback(one.close)
        yield made[False], made[True]


def main() -> int:
    options = argparse.ArgumentParser(prog="bench.transfer", description=__doc__.splitlines()[0])
    options.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(BARE)}; default: all")
    options.add_argument("--only", action="append", choices=(*KEYS, LATENCY), help="this figure; can be given again")
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--json", type=Path, help="put the figures into this file, beside those of earlier runs")
    options.add_argument("--table", type=Path, metavar="JSON", help="measure nothing: the table of this file")
    asked = options.parse_args()
    if asked.table:
        kept = json.loads(asked.table.read_text())
        print("\n".join(report.table(kept)))
        return int(bool(report.missed(kept["results"])))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("bench.transfer needs two cores, one for either process", file=sys.stderr)
        return 2
    if strange := [engine for engine in asked.engines if engine not in BARE]:
        print(f"there is no bare loop on {strange[0]}; there are {', '.join(BARE)}", file=sys.stderr)
        return 2
    globals().update(OWN=cores[0], THEIR=cores[1])
    os.sched_setaffinity(0, {OWN})
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"the machine is not quiet: load average {load:.1f}", file=sys.stderr)
    results: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for engine in asked.engines or BARE:
        try:
            results.append(measure(engine, asked.pairs, set(asked.only or (*KEYS, LATENCY))))
        except registry.MissingEngine as error:
            print(f"{engine} is left out: {error}", file=sys.stderr)
            continue
        print("\n".join(report.lines(results[-1])), flush=True)
        if asked.json:  # after each, so that a run that is cut short has shown something
            kept = report.keep(asked.json, results[-1:], describe())
    missed = report.missed(kept or results)
    for what in missed:
        print(f"missed: {what}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
