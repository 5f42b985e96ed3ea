"""Plays a scene: its unsafe twin first, then the product, each on a warm cluster of its own; then the report."""

from __future__ import annotations

import json
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from quiesce.lab.race.late_read import LateRead
from quiesce.lab.race.picture import write_picture
from quiesce.lab.race.refused import Refused
from quiesce.lab.race.restart import Restart
from quiesce.lab.race.scenes import OnePair, Reuse, Tainted, TwoDonors
from quiesce.lab.race.stage import Run, Scene, Stage

SCENES: dict[str, Scene] = {
    scene.name: scene for scene in (OnePair(), TwoDonors(), Refused(), Restart(), Tainted(), Reuse(), LateRead())
}  # fmt: skip
console = Console(highlight=False)


@dataclass
class Play:
    """All runs of one scene on one engine."""

    scene: str
    transfer: str
    unsafe: list[Run] = field(default_factory=list)
    safe: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    start_seconds: list[float] = field(default_factory=list)  # until each of the two clusters was warm
    cannot: str = ""  # why the unsafe twin has not been run

    @property
    def as_it_should(self) -> bool:
        """Unsafe shows the fault every time, safe never: the first shows that the second says something."""
        return all(run.shown for run in self.unsafe) and all(run.clean for run in self.safe)


def play(model: Path, scene: Scene, transfer: str, unsafe: int, safe: int, told: Callable[[Run], None]) -> Play:
    began = time.monotonic()
    done = Play(scene.name, transfer, cannot=scene.cannot.get(transfer.partition("/")[0], ""))
    for is_safe, count, runs in ((False, 0 if done.cannot else unsafe, done.unsafe), (True, safe, done.safe)):
        for run in _runs(model, scene, transfer, is_safe, count, done.start_seconds):
            runs.append(run)
            told(run)
    done.seconds = time.monotonic() - began
    return done


def _runs(model: Path, scene: Scene, transfer: str, safe: bool, count: int, started: list[float]) -> Iterator[Run]:
    """`started` is told how long it took until the cluster was warm."""
    if not count:
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qs-") as folder:
        log = Path(tempfile.gettempdir()) / f"{Path(folder).name}.log"
        with Stage(model, Path(folder), scene, safe, transfer=transfer, log=log) as stage:
            baseline = stage.baseline(stage.chat(scene.victim), scene.tokens)
            started.append(time.monotonic() - began)
            for _ in range(count):
                yield scene.run(stage, baseline, safe)
        log.unlink(missing_ok=True)


# ------------------------------------------------------------ the command


def race(
    scene: str, model: Path, transfer: str, *, unsafe: int, safe: int, out: Path, open_picture: bool, as_json: bool
) -> int:
    """Returns the exit code: 1 when unsafe did not show the fault each time, or safe did once."""
    played = SCENES[scene]
    console.print(f"[bold]{scene}[/bold] on {transfer}: {unsafe} unsafe runs, {safe} safe ones")

    def told(run: Run) -> None:
        mark = "[green]safe  [/green]" if run.safe else "[red]unsafe[/red]"
        console.print(f"  {mark} {run.ended - run.began:5.1f} s  {escape(run.said)}", soft_wrap=True)

    done = play(model, played, transfer, unsafe, safe, told)
    name = f"race-{scene}-{transfer}".replace("/", "-")  # a lane is no folder
    picture = write_picture(done.unsafe[:1] + done.safe[:1], out / name)
    _verdict(done, picture)
    if as_json:
        print(json.dumps(summary(done)))
    if open_picture:
        webbrowser.open(picture.as_uri())
    return 0 if done.as_it_should else 1


def _verdict(done: Play, picture: Path) -> None:
    if done.cannot:
        console.print(f"{done.scene} cannot go wrong on {done.transfer}: {done.cannot}", soft_wrap=True)
    shown, clean = sum(run.shown for run in done.unsafe), sum(run.clean for run in done.safe)
    colour = "green" if done.as_it_should else "red"
    console.print(
        f"[{colour}]unsafe showed the fault in {shown} of {len(done.unsafe)} runs; safe was clean in {clean} of "
        f"{len(done.safe)}[/{colour}] ({done.seconds:.0f} s)"
    )
    console.print(f"picture: {picture}", soft_wrap=True)


def summary(done: Play) -> dict[str, Any]:
    def plain(run: Run) -> dict[str, Any]:
        return {name: value for name, value in asdict(run).items() if name not in ("notes", "labels")}

    return {
        "scene": done.scene,
        "transfer": done.transfer,
        "seconds": done.seconds,
        "start_seconds": done.start_seconds,
        "cannot": done.cannot,
        "as_it_should": done.as_it_should,
        "unsafe": [plain(run) for run in done.unsafe],
        "safe": [plain(run) for run in done.safe],
    }
