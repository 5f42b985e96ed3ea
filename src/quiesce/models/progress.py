"""What a person sees while a model is prepared: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

Report = Callable[[int], None]  # takes the bytes done since the last call


class Steps:
    """Shows each step on stderr, so that stdout stays free for results; silent when `shown` is False."""

    def __init__(self, shown: bool) -> None:
        self.console = Console(stderr=True, quiet=not shown, soft_wrap=True, highlight=False)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Report]:
        """Run one step of `total` bytes; yields the function that moves its bar."""
        started = time.monotonic()
        if self.console.is_terminal and not self.console.quiet:
            with Progress(
                TextColumn("{task.description:<34}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=self.console,
            ) as bar:
                task = bar.add_task(title, total=total)
                yield lambda done: bar.advance(task, done)
                bar.update(task, completed=total)
        else:
            self.say(f"{title} ({total / 1e6:.0f} MB) ...")
            yield lambda done: None
            self.say(f"{title}: done in {time.monotonic() - started:.1f} s")
