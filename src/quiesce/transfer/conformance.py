"""What every transport must show, with real processes: `python -m quiesce.transfer.conformance FACTORY`.

FACTORY is `module:function`, a function (run_dir, epoch, pages, page_bytes) -> (transport, arena). Each check
takes a Bench and raises Nonconforming with what was seen. Capabilities that are not claimed are not tested.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quiesce.transfer.conformance_party import load_factory, open_files
from quiesce.transfer.interface import FenceProof, PeerLost, Transport

PAGES, PAGE_BYTES = 256, 64 << 10
ALL = list(range(PAGES))
PATIENCE = 20.0  # seconds until a condition that must come true counts as failed
WATCH_FOR_LATE = 0.06  # seconds; a copy in flight takes about 4 ms
SENTINEL = 0xEE  # no source page holds it


class Nonconforming(AssertionError):
    """The transport does not do what the suite, or its own capabilities, say."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Nonconforming(what)


class Far:
    """A party in a process of its own."""

    def __init__(self, factory: str, run_dir: Path, bench: Bench) -> None:
        self.epoch = secrets.randbits(63)
        self.seen: dict[int, str] = {}  # outcomes by post
        self._bench = bench
        numbers = map(str, (self.epoch, PAGES, PAGE_BYTES))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quiesce.transfer.conformance_party", factory, str(run_dir), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *values: self.call(name, *values)

    def call(self, name: str, *values: Any) -> Any:
        """One command of the party; our own transports are served while it runs."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([name, values]).encode() + b"\n")
        process.stdin.flush()
        out = process.stdout
        self._bench.until(lambda: select.select([out], [], [], 0)[0], f"an answer to {name}", [out])
        line = out.readline()
        require(line, f"the party died in {name}")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Near:
    """A transport in this process, usually the lender, whose pages the checks can look at."""

    def __init__(self, factory: str, run_dir: Path) -> None:
        self.epoch = secrets.randbits(63)
        self.transport: Transport
        self.transport, self.arena = load_factory(factory)(run_dir, self.epoch, PAGES, PAGE_BYTES)
        self.region = self.transport.register(self.arena).id
        self.lost: list[PeerLost] = []

    def turn(self) -> None:
        self.transport.poll()
        self.lost += self.transport.events()

    def news_of(self, epoch: int) -> list[PeerLost]:
        return [lost for lost in self.lost if lost.peer_epoch == epoch]

    def grant(self, epoch: int, pages: list[int] = ALL) -> list[Any]:
        """Lends the pages to the peer."""
        generation = self.transport.lend(epoch, pages)
        require(generation is not None, "nothing can be lent although the peer is attached")
        return [self.region, generation, pages]

    def holds(self, page: int, value: int) -> bool:
        return bool((self.arena.pages[page] == value).all())


class Bench:
    """Makes parties, serves the near ones while anything is waited for, ends them all."""

    def __init__(self, factory: str, run_dir: Path) -> None:
        self._factory, self._run_dir = factory, run_dir
        self._far: list[Far] = []
        self._near: list[Near] = []

    def far(self) -> Far:
        self._far.append(Far(self._factory, self._run_dir, self))
        return self._far[-1]

    def near(self) -> Near:
        self._near.append(Near(self._factory, self._run_dir))
        return self._near[-1]

    def until(self, condition: Callable[[], Any], what: str, also: list[Any] | None = None) -> Any:
        """The condition's first true value, or Nonconforming after PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for near in self._near:
                near.turn()
            value = condition()
            if value:
                return value
            require(time.monotonic() < deadline, f"waited {PATIENCE:.0f} s in vain for {what}")
            select.select([near.transport for near in self._near] + (also or []), [], [], 0.02)

    def attach(self, poster: Far, lender: Near) -> int:
        """The poster's number for its connection to the lender."""
        require(lender.transport.generation(poster.epoch) is None, "attached before it was asked to")
        peer = poster.connect(lender.transport.descriptor(poster.epoch).hex())
        self.until(lambda: lender.transport.generation(poster.epoch), "the peer to attach")
        return int(peer)

    def outcome(self, poster: Far, post: int) -> str:

        def ended() -> str | None:
            poster.seen.update(poster.outcomes())
            return poster.seen.get(post)

        return str(self.until(ended, f"the outcome of post {post}"))

    def watch_for_late(self, lender: Near, why: str) -> None:
        """The pages were given away on a proof: they must now stay as their new owner left them."""
        lender.arena.pages[:] = SENTINEL
        deadline = time.monotonic() + WATCH_FOR_LATE
        while time.monotonic() < deadline:
            lender.turn()
        changed = np.flatnonzero((lender.arena.pages != SENTINEL).any(axis=1))
        require(not len(changed), f"{len(changed)} pages changed after the proof: {why}")

    def close(self) -> None:
        for far in self._far:
            far.end()
        for near in self._near:
            near.transport.close_all()


# ---------------------------------------------------------------- success


def placed_means_visible(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    source = ALL[::-1]
    post = poster.write(peer, source, ALL, lender.grant(poster.epoch))
    require(bench.outcome(poster, post) == "PLACED", "a plain write was not placed")
    lender.transport.consume_barrier(ALL)
    wrong = [b for a, b in zip(source, ALL, strict=True) if not lender.holds(b, (1 + a) % 251)]
    require(not wrong, f"{len(wrong)} pages were not visible when the post was PLACED")
    require(poster.drained(peer), "not drained although every post has ended")


def posts_are_ordered(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(0)
    grant = lender.grant(poster.epoch)
    posts = [poster.write(peer, [i], [7], grant) for i in range(60)]
    seen: list[list[Any]] = []

    def all_ended() -> bool:
        seen.extend(poster.outcomes())
        return len(seen) == len(posts)

    bench.until(all_ended, "60 posts to end")
    require([post for post, _ in seen] == posts, "posts to one peer ended out of order")
    require({outcome for _, outcome in seen} == {"PLACED"}, f"not all were placed: {seen}")
    require(lender.holds(7, 59), "a later post was overtaken by an earlier one")


# ---------------------------------------------------------------- refusal


def outside_is_refused(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.arena.pages[:] = SENTINEL
    region, generation, _ = lender.grant(poster.epoch)
    outside = [
        ("target beyond the pool", [0, 1], [0, PAGES], [0, PAGES]),
        ("target below the pool", [0, 1], [0, -1], [0, -1]),
        ("source beyond the pool", [0, PAGES], [0, 1], [0, 1]),
        ("target not in the grant", [0, 1], [0, 5], [0, 4]),
        ("more sources than targets", [0, 1], [0], [0]),
    ]
    for what, source, target, granted in outside:
        post = poster.write(peer, source, target, [region, generation, granted])
        seen = bench.outcome(poster, post)
        require(seen == "FAILED_CLEAN", f"{what}: {seen} instead of FAILED_CLEAN")
    require((lender.arena.pages == SENTINEL).all(), "a refused post has touched pages")


def wrong_generation_is_refused(bench: Bench) -> None:
    lender, poster = bench.near(), bench.far()
    peer = bench.attach(poster, lender)
    poster.fill(1)
    lender.arena.pages[:] = SENTINEL
    region, generation, pages = lender.grant(poster.epoch)
    for wrong in (generation - 1, generation + 1):
        post = poster.write(peer, ALL, ALL, [region, wrong, pages])
        seen = bench.outcome(poster, post)
        require(seen == "FAILED_CLEAN", f"generation {wrong} for {generation}: {seen}")
    require((lender.arena.pages == SENTINEL).all(), "a refused post has touched pages")


# ---------------------------------------------------------------- fences and deaths


def _storm(bench: Bench, lender: Near, poster: Far, peer: int) -> list[Any]:
    """Keep posts in flight, and wait until they really land."""
    lender.arena.pages[:] = SENTINEL
    grant = lender.grant(poster.epoch)
    poster.storm(peer, ALL, grant)
    bench.until(lambda: not lender.holds(PAGES - 1, SENTINEL), "the first write to land")
    return grant


def fence_is_final(bench: Bench, times: int = 10) -> None:
    """Fence under fire: the poster goes on posting under the old grant before, during and after."""
    lender, poster = bench.near(), bench.far()
    if lender.transport.caps.fence == "none":
        return
    peer = bench.attach(poster, lender)
    poster.fill(1)
    for _ in range(times):
        _, generation, _ = _storm(bench, lender, poster, peer)
        fence = partial(lender.transport.fence, poster.epoch, generation)
        proof: FenceProof = bench.until(fence, "a proof of the fence")
        covers = proof.peer_epoch == poster.epoch and generation <= proof.generation
        require(covers and proof.kind == "fenced", f"a proof of something else: {proof}")
        bench.watch_for_late(lender, "fence")
        newer = bench.until(lambda: lender.transport.lend(poster.epoch, ALL), "the peer to attach again")
        require(newer > proof.generation, f"generation {newer} was fenced already: {proof}")
        bench.watch_for_late(lender, "posts under the fenced grant after the peer attached again")
        again = lender.transport.fence(poster.epoch, generation)
        require(again is not None, "the same fence, asked for again, is not proven any more")
        require(lender.transport.generation(poster.epoch) == newer, "a fence of an old generation hit the new one")
    poster.calm()
    bench.until(lambda: not poster.storm_ends()["open"], "every post to end")
    ends = poster.storm_ends()
    clean = not (lender.transport.caps.failure_is_terminal and ends["UNKNOWN"])
    require(clean and ends["FAILED_CLEAN"] >= times, f"fenced posts did not end FAILED_CLEAN: {ends}")
    post = poster.write(peer, [3], [4], lender.grant(poster.epoch))
    require(bench.outcome(poster, post) == "PLACED", "no work under the new generation")
    require(lender.holds(4, 4), "the page written under the new generation is not there")


def death_of_the_poster_is_shown(bench: Bench, times: int = 3) -> None:
    lender = bench.near()
    for _ in range(times):
        poster = bench.far()
        peer = bench.attach(poster, lender)
        poster.fill(1)
        _, generation, _ = _storm(bench, lender, poster, peer)
        require(lender.transport.gone(poster.epoch) is None, "called dead while it writes")
        poster.kill()
        told = bench.until(partial(lender.news_of, poster.epoch), "news of the death")
        require(told[0].generation == generation, f"news of another generation: {told}")
        if lender.transport.caps.fence != "death":
            continue
        proof = bench.until(partial(lender.transport.gone, poster.epoch), "a proof of the death")
        covers = proof.peer_epoch == poster.epoch and generation <= proof.generation
        require(covers and proof.kind == "gone", f"a proof of something else: {proof}")
        bench.watch_for_late(lender, "death of the poster")
        require(lender.transport.generation(poster.epoch) is None, "a dead peer is still attached")


def death_of_the_lender_ends_posts(bench: Bench) -> None:
    mortal, poster, other = bench.far(), bench.far(), bench.near()
    poster.fill(1)
    peer = poster.connect(mortal.descriptor(poster.epoch))
    generation = bench.until(lambda: mortal.lend(poster.epoch, ALL), "the peer to attach")
    poster.storm(peer, ALL, [0, generation, ALL])
    bench.until(lambda: poster.storm_ends()["PLACED"], "writes to land")
    mortal.kill()
    bench.until(lambda: mortal.epoch in poster.lost(), "news of the lender's death")
    poster.calm()
    bench.until(lambda: not poster.storm_ends()["open"], "posts to the dead lender to end")
    post = poster.write(peer, [0], [0], [0, generation, ALL])
    require(bench.outcome(poster, post) != "PLACED", "placed in the memory of a dead lender")
    peer = bench.attach(poster, other)
    post = poster.write(peer, [9], [2], other.grant(poster.epoch))
    require(bench.outcome(poster, post) == "PLACED", "no work for another lender afterwards")
    require(other.holds(2, 10), "the page written for the other lender is not there")


# ---------------------------------------------------------------- many, and for long


def peers_do_not_mix(bench: Bench) -> None:
    lenders = [bench.near() for _ in range(5)]
    posters = [bench.far() for _ in range(2)]
    for number, poster in enumerate(posters):
        poster.fill(40 * number)
    work = []
    for index, lender in enumerate(lenders):
        for number, poster in enumerate(posters):
            peer = bench.attach(poster, lender)
            pages = ALL[number::2]
            source = [(page + index) % PAGES for page in pages]
            post = poster.write(peer, source, pages, lender.grant(poster.epoch, pages))
            work.append((number, index, pages, source, post))
    for number, _, _, _, post in work:
        require(bench.outcome(posters[number], post) == "PLACED", f"post {post} was not placed")
    for number, index, pages, source, _ in work:
        for a, b in zip(source, pages, strict=True):
            require(lenders[index].holds(b, (40 * number + a) % 251), f"page {b} of lender {index} is wrong")


def reconnecting_leaks_nothing(bench: Bench, times: int = 50) -> None:
    lender, poster = bench.near(), bench.far()
    descriptor = lender.transport.descriptor(poster.epoch).hex()
    seen: list[int] = []
    files: tuple[int, list[int]] = (0, [])
    for turn in range(times):
        peer = bench.attach(poster, lender)
        generation = lender.transport.generation(poster.epoch) or 0
        require(not seen or generation > seen[-1], f"generation {generation} after {seen[-1:]}")
        seen.append(generation)
        require(poster.connect(descriptor) == peer, "the same descriptor gave another connection")
        if turn == 4:
            files = (open_files(os.getpid()), poster.files())
        poster.disconnect(peer)
        bench.until(lambda: lender.transport.generation(poster.epoch) is None, "the peer to detach")

    def as_before() -> bool:
        now = (open_files(os.getpid()), poster.files())
        return now[0] <= files[0] and all(a <= b for a, b in zip(now[1], files[1], strict=True))

    bench.until(as_before, f"open files of (lender, [poster, its helpers]) to be {files} again")


CHECKS: list[Callable[[Bench], None]] = [
    placed_means_visible,
    posts_are_ordered,
    outside_is_refused,
    wrong_generation_is_refused,
    fence_is_final,
    death_of_the_poster_is_shown,
    death_of_the_lender_ends_posts,
    peers_do_not_mix,
    reconnecting_leaks_nothing,
]


def run(check: Callable[[Bench], None], factory: str) -> None:
    """One check on a bench of its own. Raises Nonconforming."""
    with tempfile.TemporaryDirectory(prefix="q-") as folder:
        bench = Bench(factory, Path(folder))
        try:
            check(bench)
        finally:
            bench.close()


def main(factory: str) -> int:
    """0 when every check passed."""
    failed = 0
    for check in CHECKS:
        try:
            run(check, factory)
            print(f"ok      {check.__name__}", flush=True)
        except Nonconforming as error:
            failed = 1
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
