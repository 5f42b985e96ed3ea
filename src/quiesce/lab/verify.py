"""`quiesce verify`: every world searched to the end, every mutant caught with its shortest story."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from quiesce.lab.checker.handshake import search_handshake
from quiesce.lab.checker.liveness import search_live
from quiesce.lab.checker.search import Result, search
from quiesce.lab.deep_worlds import DEEP
from quiesce.lab.mutants import MUTANTS, Mutant
from quiesce.lab.story import tell
from quiesce.lab.worlds import WORLDS, World

MUTANT_LIMIT = 400_000  # states; a mutant that survives so many is not caught


class UnknownWorld(ValueError):
    """There is no world (or mutant) of that name; the message lists those that there are."""


def verify(
    worlds: Iterable[World] = WORLDS,
    *,
    seconds: float | None = None,
    progress: Callable[[Result, int], None] | None = None,
) -> Iterator[Result]:
    """Searches each world in turn. `seconds` bounds all of them together; what it cut off is not `complete`."""
    ends = None if seconds is None else time.monotonic() + seconds

    def go_on(result: Result, waiting: int) -> bool:
        if progress is not None:
            progress(result, waiting)
        return ends is None or time.monotonic() < ends

    for world in worlds:
        if ends is not None and time.monotonic() >= ends:
            yield Result(world)
            continue
        look = search_handshake if world.handshake else search_live if world.live else search
        yield look(world, progress=go_on)


def hunt(mutant: Mutant, *, limit: int = MUTANT_LIMIT) -> Result:
    """The shortest violation that the checker finds once the guard is gone; `broken` is None when there is none.

    The machines are put back before this returns, so a story must be told by `story_of`."""
    with mutant.made():
        if mutant.world.handshake:
            return search_handshake(mutant.world)
        if mutant.live:
            return search_live(mutant.world, limit=limit)
        return search(mutant.world, strict=mutant.strict, limit=limit)


def story_of(result: Result, mutant: Mutant | None = None) -> list[str]:
    """The violation in plain words, a line an event."""
    if mutant is None:
        return tell(result)
    with mutant.made():
        return tell(result)


def choose(name: str | None, *, deep: bool) -> tuple[World, ...]:
    if name is None:
        return (*WORLDS, *DEEP) if deep else WORLDS
    chosen = tuple(world for world in (*WORLDS, *DEEP) if world.name == name)
    if not chosen:
        there = ", ".join(world.name for world in (*WORLDS, *DEEP))
        raise UnknownWorld(f"there is no world {name!r}; there are: {there}")
    return chosen


# ------------------------------------------------------------------------------------------------ for people


def run(
    deep: bool = False,
    mutants: bool = False,
    world: str | None = None,
    seconds: float | None = None,
    console: Console | None = None,
) -> int:
    """What the command does. 0: nothing found (and every mutant caught); 1: a violation, or a mutant survived;
    2: no such world, or nothing would be searched. With `mutants`, `world` may name one mutant."""
    console = console or Console()
    refused = _refused(deep, mutants, seconds)
    if refused is not None:
        console.print(f"[red]{refused}[/red]", highlight=False)
        return 2
    try:
        return _hunt_all(world, console) if mutants else _search_all(choose(world, deep=deep), seconds, console)
    except UnknownWorld as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 2


def _refused(deep: bool, mutants: bool, seconds: float | None) -> str | None:
    if seconds is not None and not seconds > 0:
        return f"--seconds must be above 0, not {seconds}: nothing would be searched"
    if mutants and (deep or seconds is not None):
        return "--mutants searches each mutant to its shortest story: leave out --deep and --seconds"
    return None


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _search_all(worlds: tuple[World, ...], seconds: float | None, console: Console) -> int:
    table = Table("world", "what may happen", "states", "depth", "states/s", "", box=None, pad_edge=False)
    for column in (2, 3, 4):
        table.columns[column].justify = "right"
    broken: Result | None = None
    states = finished = 0
    began = time.monotonic()
    with _bar(console) as bar:
        task: TaskID = bar.add_task("", total=len(worlds), said="")

        def progress(result: Result, waiting: int) -> None:
            said = f"{states + result.states:,} states, {waiting:,} to look at, depth {result.depth}"
            bar.update(task, description=result.world.name, said=said)

        for result in verify(worlds, seconds=seconds, progress=progress):
            states += result.states
            finished += result.complete
            verdict = "[red]BROKEN[/red]" if result.broken else "to the end" if result.complete else "not finished"
            rate = f"{result.states / result.seconds:,.0f}" if result.seconds else "-"
            what = result.world
            table.add_row(what.name, what.about, f"{result.states:,}", str(result.depth), rate, verdict)
            bar.advance(task)
            if result.broken:
                broken = result
                break
    console.print(table, highlight=False)
    if broken is not None:
        console.print(f"\nIn world {broken.world.name!r} a rule is broken: {broken.broken}", highlight=False)
        console.print("\n".join(story_of(broken)), highlight=False)
        return 1
    counts = f"{finished} of {len(worlds)} worlds searched to the end, {states:,} states"
    console.print(f"\n{counts} in {time.monotonic() - began:.0f} s, no rule broken", highlight=False)
    return 0


def _hunt_all(name: str | None, console: Console) -> int:
    chosen = [mutant for mutant in MUTANTS if name in (None, mutant.name)]
    if not chosen:
        there = ", ".join(mutant.name for mutant in MUTANTS)
        raise UnknownWorld(f"there is no mutant {name!r}; there are: {there}")
    table = Table("guards", "mutant", "states", "story", "what breaks", box=None, pad_edge=False)
    for column in (2, 3):
        table.columns[column].justify = "right"
    survivors = []
    for mutant in chosen:
        result = hunt(mutant)
        story = story_of(result, mutant)
        verdict = result.broken or "[red]NOTHING: not caught[/red]"
        table.add_row(" ".join(mutant.guards), mutant.about, f"{result.states:,}", str(len(story)), verdict)
        console.print(f"\n[bold]{mutant.name}[/bold]: {mutant.about} ({mutant.world.about})", highlight=False)
        console.print("\n".join(story), highlight=False)
        console.print(f"  => {verdict}", highlight=False)
        if result.broken is None:
            survivors.append(mutant.name)
    console.print()
    console.print(table, highlight=False)
    console.print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants caught", highlight=False)
    return 1 if survivors else 0
