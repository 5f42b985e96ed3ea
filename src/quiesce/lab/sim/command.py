"""`quiesce sim`: seeds for as long as it is given, a bar, a report; of a broken rule the shortest story."""

from __future__ import annotations

import random
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from quiesce.lab.sim.mutants import SIM_MUTANTS, SimMutant
from quiesce.lab.sim.run import SimReport, simulate
from quiesce.lab.sim.shrink import shrunk
from quiesce.lab.sim.world import world_of

SEEDS_FOR_A_MUTANT = 400


class SimError(ValueError):
    """What was asked for cannot be simulated; the text is for people."""


class UnknownMutant(SimError):
    """There is no mutant of that name."""


@dataclass
class Total:
    """What many seeds came to. No report is kept: a search may go on for days."""

    seeds: int = 0
    requests: int = 0
    spent: float = 0.0
    seconds: float = 0.0
    events: int = 0
    messages: int = 0
    lost: int = 0
    restarts: int = 0
    retained: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    closed_by: Counter[str] = field(default_factory=Counter)

    def add(self, report: SimReport) -> None:
        self.seeds += 1
        self.requests += len(report.world.requests)
        for name in ("spent", "seconds", "events", "messages", "lost", "restarts", "retained"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.outcomes += report.outcomes
        self.closed_by += report.closed_by


def find(name: str) -> SimMutant:
    for mutant in SIM_MUTANTS:
        if mutant.name == name:
            return mutant
    raise UnknownMutant(f"there is no mutant {name!r}; there are: {', '.join(m.name for m in SIM_MUTANTS)}")


def replay(seed: int, requests: int, mutant: str | None = None, damage: bool = False) -> str:
    """The command that runs this seed again."""
    more = f" --mutant {shlex.quote(mutant)}" if mutant else ""
    return f"quiesce sim --seed {seed} --requests {requests}{more}" + (" --damage" if damage else "")


def run(
    *, seed: int | None, minutes: float | None, seeds: int | None, requests: int, mutant: str | None, damage: bool
) -> int:
    """The exit code: 1 when a rule was broken, or when a mutant was looked for and not found. Raises SimError."""
    console = Console()
    for flag, value in (("--minutes", minutes), ("--seeds", seeds), ("--requests", requests)):
        if value is not None and not 0 < value < float("inf"):
            raise SimError(f"{flag} must be above 0, not {value}: nothing would be simulated")
    if mutant == "all":
        if seed is not None or minutes is not None:
            raise SimError("--mutant all counts its seeds from 0, for each mutant: leave out --seed and --minutes")
        return _all(console, seeds or SEEDS_FOR_A_MUTANT, requests)
    one = None if mutant is None else find(mutant)
    if seed is not None and minutes is None and seeds is None:
        seeds = 1
    broken, total = _search(console, _seeds(seed), minutes, seeds, requests, one, not damage)
    _report(console, total)
    if broken is None or broken.broken is None:
        return 0
    console.print(f"\nSeed {broken.world.seed}: {broken.world.about()}", highlight=False)
    console.print(f"[red]broken[/red]: {broken.broken}", highlight=False)
    console.print(f"again: {replay(broken.world.seed, requests, mutant, damage)}\n", highlight=False)
    with _made(one):
        small, story = shrunk(broken.world, broken.broken, not damage)
    console.print(f"the same with {len(small.requests)} requests and {len(small.faults)} faults:", highlight=False)
    console.print("\n".join(story), highlight=False)
    return 1


def _seeds(first: int | None) -> Iterator[int]:
    source = random.SystemRandom()
    while True:
        yield source.getrandbits(48) if first is None else first
        if first is not None:
            first += 1


def _made(mutant: SimMutant | None) -> AbstractContextManager[None]:
    return nullcontext() if mutant is None else mutant.made()


def _search(
    console: Console,
    seeds: Iterator[int],
    minutes: float | None,
    most: int | None,
    requests: int,
    mutant: SimMutant | None,
    strict: bool,
) -> tuple[SimReport | None, Total]:
    """Until a rule breaks, `most` seeds are done, or the minutes are over (one, where nothing was said)."""
    seconds = 60 * (1.0 if minutes is None else minutes) if minutes is not None or most is None else float("inf")
    began, total = time.monotonic(), Total()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=most if most is not None else seconds, said="")
        for seed in seeds:
            spent = time.monotonic() - began
            if spent >= seconds or (most is not None and total.seeds >= most):
                return None, total
            with _made(mutant):
                report = simulate(
                    world_of(seed, requests) if mutant is None else mutant.world(seed, requests), strict=strict
                )
            total.add(report)
            said = f"{total.seeds:,} seeds, {total.requests:,} requests"
            bar.update(task, completed=total.seeds if most is not None else spent, said=said)
            if report.broken is not None:
                return report, total
    return None, total


def _report(console: Console, total: Total) -> None:
    rate = 60 * total.requests / (total.spent or 1e-9)
    table = Table("", "", box=None, show_header=False, pad_edge=False)
    table.add_row("seeds", f"{total.seeds:,}")
    table.add_row("requests", f"{total.requests:,}, {rate:,.0f} a minute of CPU time")
    table.add_row("virtual time", f"{total.seconds:,.0f} s")
    table.add_row("events", f"{total.events:,}")
    table.add_row("ends", ", ".join(f"{what} {n:,}" for what, n in total.outcomes.most_common()))
    table.add_row("leases closed", ", ".join(f"{what} {n:,}" for what, n in total.closed_by.most_common()))
    table.add_row("hand-off messages", f"{total.messages:,}, {total.lost:,} lost")
    table.add_row("restarts", f"{total.restarts:,}")
    table.add_row("retained at the end", f"{total.retained:,} pages")
    console.print(table, highlight=False)


def _all(console: Console, most: int, requests: int) -> int:
    table = Table("guards", "mutant", "what is removed", "seeds", "story", "what breaks", box=None, pad_edge=False)
    survivors = []
    for mutant in SIM_MUTANTS:
        report, searched = hunt(mutant, most, requests)
        if report is None or report.broken is None:
            survivors.append(mutant.name)
            table.add_row(
                " ".join(mutant.guards), mutant.name, mutant.about, str(searched), "-", "[red]NOTHING[/red]"
            )
            continue
        with mutant.made():
            _, story = shrunk(report.world, report.broken, mutant.strict)
        row = (str(searched), str(len(story)), report.broken.rule)
        table.add_row(" ".join(mutant.guards), mutant.name, mutant.about, *row)
        console.print(f"\n[bold]{mutant.name}[/bold]: {mutant.about}", highlight=False)
        console.print("\n".join(story), highlight=False)
    console.print(table, highlight=False)
    console.print(f"\n{len(SIM_MUTANTS) - len(survivors)} of {len(SIM_MUTANTS)} mutants caught", highlight=False)
    return 1 if survivors else 0


def hunt(mutant: SimMutant, most: int, requests: int, first: int = 0) -> tuple[SimReport | None, int]:
    """(the first run that breaks a rule, seeds that were tried)"""
    for tried, seed in enumerate(range(first, first + most), 1):
        with mutant.made():
            report = simulate(mutant.world(seed, requests), strict=mutant.strict)
        if report.broken is not None:
            return report, tried
    return None, most
