"""The faulty wrapper does what a test asks of it, and through the inner transport's own guards."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import numpy as np

from quiesce.core.messages import Grant
from quiesce.lab.faulty import Decide, Fate, FaultyTransport, seeded
from quiesce.transfer.interface import Outcome, Peer, Post

from .conftest import PAGES, Pair


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Faulty:
    """The pair's poster behind the wrapper."""

    def __init__(self, pair: Pair, decide: Decide, clock: Callable[[], float] = time.monotonic) -> None:
        self.pair = pair
        self.peer: Peer = pair.attach()
        self.outside = FaultyTransport(pair.poster.transport, decide, clock=clock)
        self.ended: dict[Post, Outcome] = {}

    def write(self, pages: int) -> Post:
        pages_ = list(range(pages))
        return self.outside.write(self.peer, pages_, pages_, self.pair.grant())

    def turn(self) -> None:
        self.ended.update(self.outside.poll())
        self.outside.events()
        self.pair.lender.turn()

    def settle(self) -> None:
        """Until the inner transport has placed all that it was given."""
        self.until(lambda: self.pair.poster.transport.drain(self.peer))
        self.turn()

    def until(self, condition: Callable[[], object], wait: float = 1.0) -> None:
        """`wait`: seconds after which it looks without having been told to."""
        deadline = time.monotonic() + 60
        self.turn()
        while not condition():
            assert time.monotonic() < deadline
            select.select([self.outside, self.pair.lender.transport], [], [], wait)
            self.turn()

    def landed(self) -> int:
        return int(self.pair.lender.arena.pages.any(axis=1).sum())


def test_a_held_write_is_neither_done_nor_told_until_released(pair: Pair) -> None:
    faulty = Faulty(pair, lambda pages: Fate(hold=True))
    one, two = faulty.write(4), faulty.write(8)
    faulty.settle()
    assert faulty.outside.held() == [one, two] and faulty.landed() == 0 and not faulty.ended
    assert not faulty.outside.drain(faulty.peer)
    faulty.outside.release(one)
    faulty.until(lambda: one in faulty.ended)
    assert faulty.landed() == 4 and faulty.ended == {one: Outcome.PLACED}
    assert faulty.outside.try_cancel(two) and not faulty.outside.try_cancel(one)
    assert faulty.outside.drain(faulty.peer) and faulty.landed() == 4


def test_a_slow_write_lands_page_by_page(pair: Pair) -> None:
    clock = Clock()
    faulty = Faulty(pair, lambda pages: Fate(ms_per_page=10.0), clock)
    one, two = faulty.write(3), faulty.write(2)
    for landed in (0, 1, 2, 3):
        faulty.settle()
        assert faulty.landed() == landed and (one in faulty.ended) == (landed == 3)
        clock.now += 0.0101
    assert two not in faulty.ended, "one wire for each peer: the second waits for the first"
    clock.now += 0.02
    faulty.until(lambda: two in faulty.ended)
    assert set(faulty.ended.values()) == {Outcome.PLACED}


def test_a_slow_write_wakes_its_loop_by_itself(pair: Pair) -> None:
    faulty = Faulty(pair, lambda pages: Fate(ms_per_page=2.0))
    started = time.monotonic()
    post = faulty.write(20)
    faulty.until(lambda: post in faulty.ended, wait=50.0)
    assert 0.04 <= time.monotonic() - started < 40, "nobody looked before it was told to"


def test_a9_an_unknown_outcome_goes_on_writing(pair: Pair) -> None:
    clock = Clock()
    faulty = Faulty(pair, lambda pages: Fate(ms_per_page=10.0, tell_unknown=True), clock)
    post = faulty.write(3)
    faulty.turn()
    assert faulty.ended == {post: Outcome.UNKNOWN} and faulty.landed() == 0
    assert not faulty.outside.try_cancel(post) and not faulty.outside.drain(faulty.peer)
    clock.now += 1.0
    faulty.settle()
    faulty.settle()
    assert faulty.landed() == 3 and faulty.outside.drain(faulty.peer)
    assert faulty.ended == {post: Outcome.UNKNOWN}


def test_a_clean_failure_stops_where_it_says(pair: Pair) -> None:
    faulty = Faulty(pair, lambda pages: Fate(fail_after=2))
    post = faulty.write(5)
    faulty.until(lambda: post in faulty.ended)
    assert faulty.ended == {post: Outcome.FAILED_CLEAN} and faulty.landed() == 2


def test_h16_a_held_write_meets_the_fence_when_it_is_released(pair: Pair) -> None:
    faulty = Faulty(pair, lambda pages: Fate(hold=True))
    grant, epoch = pair.grant(), pair.poster.epoch
    post = faulty.write(5)
    faulty.until(lambda: pair.lender.transport.fence(epoch, grant.generation))
    faulty.until(lambda: pair.lender.transport.generation(epoch))
    faulty.outside.release()
    faulty.until(lambda: post in faulty.ended)
    assert faulty.ended == {post: Outcome.FAILED_CLEAN} and faulty.landed() == 0


def test_closing_ends_held_and_slow_writes_clean(pair: Pair) -> None:
    fates = iter([Fate(hold=True), Fate(ms_per_page=1000.0)])
    faulty = Faulty(pair, lambda pages: next(fates))
    posts = [faulty.write(5), faulty.write(5)]
    faulty.outside.close_all()
    assert dict(faulty.outside.poll()) == dict.fromkeys(posts, Outcome.FAILED_CLEAN)
    pair.sides.remove(pair.poster)


def test_a_seed_gives_the_same_fates_again() -> None:
    def draw(seed: int) -> list[Fate]:
        decide = seeded(seed, hold=0.2, unknown=0.2, fail=0.2, ms_per_page=(1.0, 5.0))
        return [decide(PAGES) for _ in range(200)]

    assert draw(1) == draw(1) != draw(2)
    fates = draw(1)
    assert 0 < sum(fate.hold for fate in fates) < 100
    assert 0 < sum(fate.fail_after is not None for fate in fates) < 100
    assert np.all([1.0 <= fate.ms_per_page <= 5.0 for fate in fates])
    assert seeded(1)(5) == Fate()


def test_nothing_unusual_is_the_inner_transport(pair: Pair) -> None:
    faulty = Faulty(pair, seeded(3))
    posts = [faulty.write(PAGES) for _ in range(5)]
    faulty.until(lambda: len(faulty.ended) == 5)
    assert list(faulty.ended) == posts and set(faulty.ended.values()) == {Outcome.PLACED}
    assert (pair.lender.arena.pages == pair.poster.arena.pages).all()
    refused = faulty.outside.write(faulty.peer, [0], [1], Grant(0, 999, (1,)))
    faulty.until(lambda: refused in faulty.ended)
    assert faulty.ended[refused] is Outcome.FAILED_CLEAN
