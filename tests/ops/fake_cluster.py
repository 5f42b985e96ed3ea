"""A supervised cluster of shell scripts: the processes are real, only what they do is small."""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quiesce.ops.console import Console
from quiesce.ops.probe import Health
from quiesce.ops.supervisor import Child, Plan, Supervisor, Timing

OBEDIENT = "trap 'echo {name} >> {log}; exit 0' TERM; echo hello from {name}; while :; do sleep 0.02; done"
DEADLINE = 60.0


class FakeCluster:
    """`scripts`: name -> sh script ({name}, {log}); `ready`: names that get into good standing."""

    def __init__(self, folder: Path, scripts: dict[str, str], ready: set[str], timing: Timing | None = None) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self.scripts = scripts
        self.ready = ready
        self.starts: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []
        self.ready_calls = 0
        self.stream = io.StringIO()
        plans = [Plan(name, self._command(name), is_router=name == "router") for name in scripts]
        self.supervisor = Supervisor(
            plans,
            self._probe,
            lambda name, epoch: self.told.append((name, epoch)),
            self._on_ready,
            Console(list(scripts), self.stream),
            timing or Timing(drain=30.0, start=60.0, grace=30.0),
            dict(os.environ),
        )

    @property
    def output(self) -> str:
        return self.stream.getvalue()

    @property
    def children(self) -> dict[str, Child]:
        return {child.plan.name: child for child in self.supervisor._children}

    def pid(self, name: str) -> int:
        process = self.children[name].process
        assert process is not None
        return process.pid

    def _command(self, name: str) -> Callable[[int], list[str]]:
        def command(epoch: int) -> list[str]:
            self.starts.append((name, epoch))
            return ["sh", "-c", self.scripts[name].replace("{name}", name).replace("{log}", str(self.log))]

        return command

    def _is_up(self, name: str) -> bool:
        """It has spoken, so its traps are set."""
        process = self.children[name].process
        return name in self.ready and process is not None and bool(process.last_lines)

    async def _probe(self) -> Health:
        router_up = self._is_up("router")
        workers = frozenset(
            child.epoch for name, child in self.children.items() if name != "router" and self._is_up(name)
        )
        ready = router_up and len(workers) == len(self.scripts) - 1
        return Health(router_up, ready, workers, "" if ready else "no decode worker is usable")

    def _on_ready(self) -> None:
        self.ready_calls += 1

    async def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {DEADLINE} s; so far:\n{self.output}"
            await asyncio.sleep(0.005)
        return value

    def play(self, story: Callable[[], Any] | None = None) -> int:
        """Runs the supervisor with `story` beside it; returns the exit code."""

        async def both() -> int:
            running = asyncio.create_task(self.supervisor.run())
            if story is not None:
                told = asyncio.create_task(story())
                await asyncio.wait([running, told], return_when=asyncio.FIRST_COMPLETED)
                if told.done() and told.exception() is not None:
                    self.supervisor.stop()
                    self.supervisor.stop()
                await told
            return await asyncio.wait_for(running, DEADLINE)

        return asyncio.run(both())


def alive_in_group(group: int) -> bool:
    """True while a process of this group lives; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = re.sub(r"\(.*\)", "x", stat.read_text(), flags=re.DOTALL).split()
        except OSError:
            continue
        if int(fields[4]) == group and fields[2] not in "ZX":
            return True
    return False
