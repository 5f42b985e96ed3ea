"""The parties of a check: near ones whose pages it can look at, far ones in processes of their own."""

from __future__ import annotations

import json
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quiesce.transfer.conformance.party import load
from quiesce.transfer.interface import Access, Capabilities, PeerLost, Transport

PAGES, PAGE_BYTES = 256, 64 << 10
ALL = list(range(PAGES))
PATIENCE = 20.0  # seconds until a condition that must come true counts as failed
START_PATIENCE = 150.0  # ... that waits for a process to start, at least: its libraries may take long to load
WATCH_FOR_LATE = 0.06  # seconds; a copy in flight takes about 4 ms
RUN_PARTY = "import sys; from quiesce.transfer.conformance.party import main; main(sys.argv[1:])"
SENTINEL = 0xEE  # no source page holds it
SCALE = 1.0  # of how often a thing is done again; for machines that are emulated


def often(times: int, least: int = 2) -> int:
    """`times`, scaled."""
    return max(least, round(times * SCALE))


class Nonconforming(AssertionError):
    """The transport does not do what the suite, or its own capabilities, say."""


class NotClaimed(Exception):
    """The engine does not claim what the check is about."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Nonconforming(what)


class Far:
    """A party in a process of its own."""

    def __init__(self, engine: str, run_dir: Path, bench: Bench) -> None:
        self.epoch = secrets.randbits(63)
        self.seen: dict[int, str] = {}  # outcomes by post
        self._bench = bench
        self._started = False  # it has answered a command
        numbers = map(str, (self.epoch, PAGES, PAGE_BYTES))
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN_PARTY, engine, str(run_dir), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *values: self.call(name, *values)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *values: Any) -> Any:
        """One command of the party; our own transports are served while it runs."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([name, values]).encode() + b"\n")
        process.stdin.flush()
        out = process.stdout
        patience = PATIENCE if self._started else max(PATIENCE, START_PATIENCE)
        self._bench.until(lambda: select.select([out], [], [], 0)[0], f"an answer to {name}", [out], patience)
        self._started = True
        line = out.readline()
        require(line, f"the party died in {name}")
        return json.loads(line)

    def outcome(self, post: int) -> str:
        """One that does not come is asked for once more after a fence: so it is that a worker ends such a post."""

        def ended() -> str | None:
            self.seen.update(self.outcomes())
            return self.seen.get(post)

        what = f"the outcome of post {post}"
        try:
            return str(self._bench.until(ended, what))
        except Nonconforming as never:
            self._bench.fence(self.epoch)
            try:
                seen = self._bench.until(ended, what)
            except Nonconforming:
                raise Nonconforming(f"{never}, and after a fence as well") from never
            raise Nonconforming(f"{never}; after a fence it ended {seen}") from never

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        self._bench.until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T", "the process to stop")

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Near:
    """A transport in this process, whose pages the checks can look at."""

    def __init__(self, engine: str, run_dir: Path) -> None:
        self.epoch = secrets.randbits(63)
        self.transport: Transport
        self.transport, self.arena = load(engine, run_dir, self.epoch, PAGES, PAGE_BYTES)
        self.region = self.transport.register(self.arena).id
        self.lost: list[PeerLost] = []
        self.ended: dict[int, str] = {}  # outcomes by post

    def turn(self) -> None:
        self.ended.update((post.id, outcome.name) for post, outcome in self.transport.poll())
        self.lost += self.transport.events()

    def news_of(self, epoch: int) -> list[PeerLost]:
        return [lost for lost in self.lost if lost.peer_epoch == epoch]

    def grant(self, epoch: int, pages: list[int] = ALL, access: Access = "write") -> list[Any]:
        """Lends the pages to the peer."""
        generation = self.transport.lend(epoch, pages, access=access)
        require(generation is not None, "nothing can be lent although the peer is attached")
        return [self.region, generation, pages]

    def holds(self, page: int, value: int) -> bool:
        return bool((self.arena.pages[page] == value).all())

    def wipe(self) -> None:
        self.arena.pages[:] = SENTINEL

    def untouched(self) -> bool:
        return bool((self.arena.pages == SENTINEL).all())


class Bench:
    """Makes parties, serves the near ones while anything is waited for, ends them all."""

    def __init__(self, engine: str, run_dir: Path) -> None:
        self._engine, self._run_dir = engine, run_dir
        self._far: list[Far] = []
        self._near: list[Near] = []

    def far(self) -> Far:
        self._far.append(Far(self._engine, self._run_dir, self))
        return self._far[-1]

    def near(self) -> Near:
        self._near.append(Near(self._engine, self._run_dir))
        return self._near[-1]

    def leave(self, near: Near) -> None:
        """It closes with whatever is open."""
        self._near.remove(near)
        near.transport.close_all()

    def claims(self, near: Near, what: str, held: Callable[[Capabilities], bool]) -> None:
        """Raises NotClaimed."""
        if not held(near.transport.caps):
            raise NotClaimed(f"{near.transport.caps.label} does not claim {what}")

    def until(
        self, condition: Callable[[], Any], what: str, also: list[Any] | None = None, patience: float | None = None
    ) -> Any:
        """The condition's first true value, or Nonconforming after `patience` seconds, PATIENCE when None."""
        patience = PATIENCE if patience is None else patience
        deadline = time.monotonic() + patience
        while True:
            for near in self._near:
                near.turn()
            value = condition()
            if value:
                return value
            require(time.monotonic() < deadline, f"waited {patience:.0f} s in vain for {what}")
            select.select([*(near.transport for near in self._near), *(also or [])], [], [], 0.02)

    def attach(self, poster: Far, lender: Near) -> int:
        """The poster's number for its connection to the lender."""
        require(lender.transport.generation(poster.epoch) is None, "attached before it was asked to")
        peer = poster.connect(lender.transport.descriptor(poster.epoch).hex())
        self.until(lambda: lender.transport.generation(poster.epoch), "the peer to attach")
        return int(peer)

    def storm(self, lender: Near, poster: Far, peer: int) -> list[Any]:
        """Keep posts in flight, and wait until they really land."""
        lender.wipe()
        grant = lender.grant(poster.epoch)
        poster.storm(peer, ALL, grant)
        self.until(lambda: not lender.holds(PAGES - 1, SENTINEL), "the first write to land")
        return grant

    def fence(self, epoch: int) -> None:
        """Asks every near one to take its access from that peer, and waits for no proof."""
        for near in self._near:
            near.transport.fence(epoch)

    def watch_for_late(self, near: Near, why: str) -> None:
        """The pages were given away on a proof: they must now stay as their new owner left them."""
        near.wipe()
        deadline = time.monotonic() + WATCH_FOR_LATE
        while time.monotonic() < deadline and near.untouched():
            near.turn()
        changed = np.flatnonzero((near.arena.pages != SENTINEL).any(axis=1))
        require(not len(changed), f"{len(changed)} pages changed after the proof: {why}")

    def watch_nothing(self, seconds: float) -> None:
        """Lets time pass, in which something wrong might happen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for near in self._near:
                near.turn()
            select.select([], [], [], 0.01)

    def close(self) -> None:
        for far in self._far:
            far.end()
        for near in self._near:
            near.transport.close_all()
