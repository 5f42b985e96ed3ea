"""Runs one cluster on this machine: starts its processes, restarts those that die, drains, leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quiesce.ops.console import Console, exit_words
from quiesce.ops.probe import Health, Probe
from quiesce.ops.process import Process, adopt_orphans
from quiesce.ops.restarts import Restarts
from quiesce.roles.settings import new_epoch

log = logging.getLogger("quiesce.supervisor")

QUICK_POLL = 0.1  # seconds between looks at the health while something is starting
CALM_POLL = 1.0
WAITING_NOTE = 10.0  # seconds between notes on what a start waits for
GRACE = 5.0  # seconds beyond the drain timeout before a process is killed
EXIT_FAILED = 1


@dataclass(frozen=True)
class Plan:
    """A process to keep running. `command(epoch)` gives its command line; `prepare` runs before each start."""

    name: str
    command: Callable[[int], Sequence[str]]
    prepare: Callable[[], object] = lambda: None
    is_router: bool = False


@dataclass
class Child:
    plan: Plan
    restarts: Restarts = field(default_factory=Restarts)
    process: Process | None = None
    epoch: int = 0
    waiting_since: float = 0.0  # its start, or when it was last seen to be no longer ready
    told: float = 0.0  # when it was last said that its start takes long
    killed_for: str = ""
    pending: asyncio.TimerHandle | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    drain: float = 10.0
    start: float = 300.0
    grace: float = GRACE


class Supervisor:
    """`announce(name, epoch)` tells the router that a worker process is dead and reaped.

    `on_ready` is called once, when a request can be served. `run` returns the exit code: 0 after a clean drain,
    1 when a process could not be started or had to be killed.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        probe: Probe,
        announce: Callable[[str, int], None],
        on_ready: Callable[[], None],
        console: Console,
        timing: Timing | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._plans = plans
        self._probe = probe
        self._announce = announce
        self._on_ready = on_ready
        self._console = console
        self._timing = timing or Timing()
        self._environment = os.environ if environment is None else environment
        self._children: list[Child] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._was_ready = False
        self._answering_since: float | None = None
        self._failure: str | None = None

    async def run(self) -> int:
        adopt_orphans(True)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        self._children = [Child(plan) for plan in self._plans]
        for child in self._children:
            self._launch(child)
        watch = loop.create_task(self._watch(), name="watch")
        watch.add_done_callback(self._watch_ended)
        await self._stop.wait()
        watch.cancel()
        clean = await self._drain()
        adopt_orphans(False)
        return 0 if clean and self._failure is None else EXIT_FAILED

    def stop(self) -> None:
        """The first call drains; the next one cuts the drain short."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    # ------------------------------------------------------------ keeping it running

    def _launch(self, child: Child) -> None:
        child.pending = None
        child.epoch = new_epoch()
        child.waiting_since = child.told = time.monotonic()
        child.killed_for = ""
        child.ended.clear()
        try:
            child.plan.prepare()
            child.process = Process(
                child.plan.command(child.epoch),
                self._environment,
                lambda line: self._console.line(child.plan.name, line),
                lambda code: self._exited(child, code),
            )
        except OSError as error:
            child.process = None
            child.ended.set()
            self._restart(child, EXIT_FAILED, f"could not be started: {error}", [])

    def _exited(self, child: Child, code: int) -> None:
        process, child.process = child.process, None
        child.ended.set()
        if not child.plan.is_router:
            self._announce(child.plan.name, child.epoch)
        if not self._stop.is_set():
            last = list(process.last_lines) if process is not None else []
            self._restart(child, code, child.killed_for or exit_words(code), last)

    def _restart(self, child: Child, code: int, how: str, last_lines: list[str]) -> None:
        delay = child.restarts.died(time.monotonic(), code)
        name, deaths = child.plan.name, child.restarts.deaths
        if delay is None:
            times = f" {deaths} times in a row" if deaths > 1 else ""
            self._failure = f"Quiesce cannot start: {name} {how}{times}, and was never ready."
            self._console.quote(self._failure, last_lines)
            self._stop.set()
            return
        again = f" ({deaths} in a row)" if deaths > 1 else ""
        self._console.quote(f"{name} {how}{again}; starting it again in {delay:g} s.", last_lines[-3:])
        child.pending = asyncio.get_running_loop().call_later(delay, self._launch, child)

    async def _watch(self) -> None:
        while True:
            health = await self._probe()
            starting = self._take(health, time.monotonic())
            await asyncio.sleep(QUICK_POLL if starting else CALM_POLL)

    def _take(self, health: Health, now: float) -> bool:
        """Acts on one look at the cluster. True while something is still starting."""
        starting = False
        if not health.answers:
            self._answering_since = None
        elif self._answering_since is None:
            self._answering_since = now
        for child in self._children:
            if child.process is None:
                starting = True
            elif health.answers if child.plan.is_router else child.epoch in health.workers:
                if child.restarts.ready(now) and child.restarts.deaths:
                    self._console.say(f"{child.plan.name} is ready again.")
            elif child.restarts.ready_since is not None:
                if health.answers:
                    child.restarts.unready()
                    child.waiting_since = child.told = now
            else:
                starting = True
                self._hasten(child, health, now)
        if health.ready and not self._was_ready and not starting:
            self._was_ready = True
            self._on_ready()
        return starting or not self._was_ready

    def _hasten(self, child: Child, health: Health, now: float) -> None:
        """A start that takes long is talked about, and ended when it takes too long."""
        if child.plan.is_router:
            since = child.waiting_since
        elif self._answering_since is not None:
            since = max(child.waiting_since, self._answering_since)
        else:
            return  # it cannot be ready before the router is
        waited = now - since
        if waited > self._timing.start and child.process is not None and not child.killed_for:
            child.killed_for = f"was not ready within {self._timing.start:g} s"
            child.process.kill()
        elif now - child.told >= WAITING_NOTE:
            child.told = now
            why = f": {health.missing}" if health.missing else ""
            self._console.say(f"waiting for {child.plan.name}, {now - child.waiting_since:.0f} s so far{why}")

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the watch over the cluster failed", exc_info=error)
            self._failure = f"The supervisor failed: {error!r}"
            self._console.say(self._failure)
            self._stop.set()

    # ------------------------------------------------------------ ending it

    async def _drain(self) -> bool:
        """Router first, so that running requests can finish on live workers. True: nobody had to be killed."""
        for child in self._children:
            if child.pending is not None:
                child.pending.cancel()
        routers = [child for child in self._children if child.plan.is_router]
        workers = [child for child in self._children if not child.plan.is_router]
        if self._failure is None:
            self._console.say(
                f"draining: running requests have {self._timing.drain:g} s to finish; once more cuts it short"
            )
        patience = self._timing.drain + self._timing.grace
        clean = await self._end(routers, patience)
        return await self._end(workers, patience) and clean

    async def _end(self, children: list[Child], patience: float) -> bool:
        running = [child for child in children if child.process is not None]
        self._signal(running, signal.SIGTERM)
        loop = asyncio.get_running_loop()
        everybody = loop.create_task(_all(running))
        hurry = loop.create_task(_true(self._hurry))
        await asyncio.wait([everybody, hurry], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done() and not everybody.done():
            self._signal(running, signal.SIGTERM)  # a second one: do not wait for running requests
            await asyncio.wait([everybody], timeout=self._timing.grace)
        hurry.cancel()
        late = [child for child in running if child.process is not None]
        for child in late:
            self._console.say(f"{child.plan.name} did not end in time and is killed")
            if child.process is not None:
                child.process.kill()
        await everybody
        return not late

    @staticmethod
    def _signal(children: list[Child], number: int) -> None:
        for child in children:
            if child.process is not None:
                child.process.signal(number)


async def _all(children: Sequence[Child]) -> bool:
    for child in children:
        await child.ended.wait()
    return True


async def _true(event: asyncio.Event) -> bool:
    return await event.wait()
