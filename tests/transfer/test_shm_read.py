"""Reading over shared memory: the reader's mover copies out of the source's pool, which it cannot write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiesce.core.messages import Grant
from quiesce.transfer.interface import Outcome
from quiesce.transfer.shm import ShmTransport

from .conftest import ALL, PAGES, Pair, Side


class Reading(Pair):
    """`lender` is the source, filled with its page numbers; `poster` reads."""

    def __init__(self, run_dir: Path, **settings: int) -> None:
        super().__init__(run_dir, **settings)
        self.lender.arena.pages[:] = np.arange(100, 100 + PAGES, dtype=np.uint8)[:, None]

    def side(self, epoch: int, **settings: int) -> Side:
        return super().side(epoch, direction="pull", **settings)

    @property
    def reader(self) -> Side:
        return self.poster

    def read(self, dst: list[int], src: list[int], grant: Grant) -> Outcome:
        peer = self.attach()
        return self.outcome(self.reader.transport.read(peer, dst, src, grant))


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    pair = Reading(tmp_path)
    pair.attach()
    yield pair
    pair.close()


def test_what_is_read_is_there_when_it_is_placed(reading: Reading) -> None:
    before = reading.lender.arena.pages.copy()
    assert reading.read(ALL, ALL[::-1], reading.grant()) is Outcome.PLACED
    assert (reading.reader.arena.pages == before[::-1]).all()
    assert (reading.lender.arena.pages == before).all()


def test_a_read_outside_the_grant_or_either_pool_touches_nothing(reading: Reading) -> None:
    before, grant = reading.reader.arena.pages.copy(), reading.grant()
    old = Grant(0, grant.generation - 1, grant.pages)
    for what, dst, src, granted in (
        ("a page that is not granted", [0], [5], reading.grant([4])),
        ("a source page beyond the pool", [0], [PAGES], Grant(0, grant.generation, (PAGES,))),
        ("an own page beyond the pool", [PAGES], [0], grant),
        ("an own page below the pool", [-1], [0], grant),
        ("fewer own pages than source pages", [0], [0, 1], grant),
        ("an older generation", [0], [0], old),
        ("another region", [0], [0], Grant(1, grant.generation, grant.pages)),
    ):
        assert reading.read(dst, src, granted) is Outcome.FAILED_CLEAN, what
    assert (reading.reader.arena.pages == before).all()


def test_who_reads_cannot_write_and_who_writes_cannot_read(reading: Reading, tmp_path: Path) -> None:
    peer, grant = reading.attach(), reading.grant()
    assert reading.outcome(reading.reader.transport.write(peer, [0], [0], grant)) is Outcome.FAILED_CLEAN
    assert reading.lender.arena.pages[0, 0] == 100
    pushing = Pair(tmp_path)
    try:
        peer, grant = pushing.attach(), pushing.grant()
        assert pushing.outcome(pushing.poster.transport.read(peer, [0], [0], grant)) is Outcome.FAILED_CLEAN
    finally:
        pushing.close()


def test_the_readers_mover_maps_the_source_for_reading_only(reading: Reading) -> None:
    reading.read(ALL, ALL, reading.grant())
    maps = Path(f"/proc/{reading.reader.mover_pid}/maps").read_text().splitlines()
    rights = sorted(line.split()[1] for line in maps if "quiesce-pages" in line)
    assert rights == ["r--s", "rw-s"], "the source's pool, and its own engine's"


def stopped(reading: Reading) -> list[int]:
    """Twenty reads of everything, with the mover stopped in the middle of them."""
    peer, grant = reading.attach(), reading.grant()
    posts = [reading.reader.transport.read(peer, ALL, ALL, grant) for _ in range(20)]
    os.kill(reading.reader.mover_pid, signal.SIGSTOP)
    reading.posts = posts  # type: ignore[attr-defined]
    return [post.id for post in posts]


def test_h16_the_sources_fence_ends_reads_and_refuses_later_ones(reading: Reading) -> None:
    stopped(reading)
    peer, grant, source = reading.attach(), reading.grant(), reading.lender.transport
    proof = reading.until(lambda: source.fence(reading.reader.epoch, grant.generation), "the fence")
    assert (proof.kind, proof.generation) == ("fenced", grant.generation)
    reading.lender.arena.pages[:] = 250  # somebody else's now
    reading.until(lambda: len(reading.reader.ended) == 20, "every outcome")
    newer = reading.until(lambda: source.generation(reading.reader.epoch), "a new attachment")
    assert newer > grant.generation
    assert reading.outcome(reading.reader.transport.read(peer, [0], [0], grant)) is Outcome.FAILED_CLEAN
    assert not (reading.reader.arena.pages == 250).any()
    assert reading.read([0], [0], reading.grant()) is Outcome.PLACED


def test_a_fence_of_ones_own_reads_leaves_none_of_them_under_way(reading: Reading) -> None:
    stopped(reading)
    grant, reader = reading.grant(), reading.reader.transport
    proof = reading.until(lambda: reader.fence(reading.lender.epoch, grant.generation), "the fence")
    assert (proof.kind, proof.peer_epoch, proof.generation) == ("fenced", reading.lender.epoch, grant.generation)
    reading.reader.arena.pages[:] = 9  # given to somebody else
    reading.until(lambda: len(reading.reader.ended) == 20, "every outcome")
    assert (reading.reader.arena.pages == 9).all()
    newer = reading.until(
        lambda: (g := reading.lender.transport.generation(reading.reader.epoch)) and g > grant.generation and g,
        "a new attachment",
    )
    pid = reading.reader.mover_pid
    reading.until(lambda: reader._poster._lenders[reading.attach().number].generation == newer, "word of it")
    assert reader.fence(reading.lender.epoch, grant.generation) is not None and reading.reader.mover_pid == pid, (
        "the same fence, asked for again, disturbs nothing"
    )
    assert reading.read([0], [3], reading.grant()) is Outcome.PLACED and reading.reader.arena.pages[0, 0] == 103


def test_the_death_of_a_mover_is_not_the_death_of_its_engine(reading: Reading) -> None:
    grant = reading.grant()
    os.kill(reading.reader.mover_pid, signal.SIGKILL)
    lost = reading.until(lambda: reading.lender.lost, "news of the death")
    assert not any(news.final for news in lost) and lost[-1].generation == grant.generation
    proof = reading.until(lambda: reading.lender.transport.gone(reading.reader.epoch), "proof of the death")
    assert proof.generation == grant.generation
    assert reading.until(lambda: reading.lender.transport.generation(reading.reader.epoch), "a new attachment")


ENGINE = """
import sys
from pathlib import Path
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.shm import ShmTransport
transport = ShmTransport(Path(sys.argv[1]), 0xE, direction="pull")
transport.register(shared_arena(64, 4096))
transport.connect(bytes.fromhex(sys.argv[2]), 0xE)
while True:
    transport.poll(), transport.events()
"""


def test_the_death_of_an_engine_is_told_as_final_and_there_is_proof(reading: Reading, tmp_path: Path) -> None:
    source = reading.lender.transport
    assert isinstance(source, ShmTransport)
    files = len(os.listdir("/proc/self/fd"))
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(tmp_path), source.descriptor().hex()])
    try:
        generation = reading.until(lambda: source.generation(0xE), "the attachment")
        assert source.gone(0xE) is None
        engine.kill()
        engine.wait()
        reading.until(lambda: [n for n in reading.lender.lost if n.peer_epoch == 0xE and n.final], "the last news")
        proof = reading.until(lambda: source.gone(0xE), "proof of the death")
        assert proof.generation == generation
    finally:
        engine.kill()
        engine.wait()
    assert len(os.listdir("/proc/self/fd")) == files, "pidfds are let go of"
