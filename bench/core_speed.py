"""`make bench-core`: what the ledger and the machines cost, against bare list operations and against their own size.

    python -m bench.core_speed [--rounds N] [--quick]

Three tables. A 128K-token request through the lender, beside what a free list alone must do for it. Then the same
operations on pools of 10^3 to 10^7 pages, and with 10 to 10^5 transfers in flight. All of one table is measured in
turns in one process; a figure is a median of CPU times, a ratio the median over rounds. Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from quiesce.core.borrower import Borrower, Chunk, ChunkReady, Complete, LenderUp, Outcome, Paired, PostEnded
from quiesce.core.ledger import Ledger
from quiesce.core.lender import End, Lender, NotRevoked, PeerLost, Publish, Revoked
from quiesce.core.machine import Heard, Post
from quiesce.core.messages import Abort, Ack, Done, Drained, FirstToken, Grant, Leg, Offer, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Proof

TOKENS, PAGE_SIZE = 131_072, 16
PAGES = TOKENS // PAGE_SIZE  # 8,192
SMALL = 64  # pages of a request of the growth tables: it must fit the smallest pool
POOLS = (10**3, 10**4, 10**5, 10**6, 10**7)
IN_FLIGHT = (10, 10**2, 10**3, 10**4, 10**5)
RATIO_GOAL = 3.0
GROWTH_GOAL = 1.5  # largest over smallest: what caches and allocators may add; growth with n would be 10^4
D, P = 1, 2  # epochs
D2, P2 = 3, 4  # of peers that have little to do with what is in flight

Work = Callable[[], None]


class Decode:
    """A lender with its ledger; `room` pages are kept free whatever is in flight."""

    def __init__(self, pool: int, in_flight: int = 0) -> None:
        self.ledger = Ledger(PagePool(pool), PagePool(in_flight + 8, "rows"))
        self.lender = Lender(D, self.ledger)
        for _ in range(in_flight):
            self._offer(1)

    def _offer(self, pages: int, peer: int = P) -> Leg:
        tid = self.lender.reserve({0: peer}, room=1, pairing=b"p", tokens=pages * PAGE_SIZE, pages=pages)
        assert tid is not None
        self.lender.on(Publish(tid, 0, 0, 1, 1000))
        return Leg(tid, 0, 0, peer)

    def commit(self, pages: int) -> None:
        """Reserve, lease, land, release."""
        leg = self._offer(pages)
        self.lender.on(Heard(Done(leg, pages, pages * PAGE_SIZE, None, FirstToken(1)), P))
        self.lender.on(End(leg.tid, "stop"))
        assert not self.ledger.knows(leg.tid)

    def abort(self, pages: int) -> None:
        """Reserve, lease, hold, a proof."""
        leg = self._offer(pages)
        self.lender.on(End(leg.tid, "client gone"))
        self.lender.on(Heard(Drained(leg), P))
        assert not self.ledger.knows(leg.tid)

    def fence(self, pages: int) -> None:
        """Reserve, lease, the peer is lost, no fence, a fence."""
        leg = self._offer(pages, P2)
        self.lender.on(PeerLost(P2, "gone"))
        self.lender.on(NotRevoked(P2, 1))
        self.lender.on(Revoked(Proof.fenced(P2, 1)))
        assert not self.ledger.knows(leg.tid)


class FreeList:
    """What any allocator must do for a request: take pages, know whose they are, name them to the writer, take them
    back. No check, no lease, no proof, no message."""

    def __init__(self, pool: int) -> None:
        self.free = list(range(pool))
        self.owned: dict[int, list[int]] = {}
        self.seq = 0

    def cycle(self, pages: int) -> tuple[int, ...]:
        self.seq += 1
        taken = self.free[-pages:]
        del self.free[-pages:]
        self.owned[self.seq] = taken
        grant = tuple(taken)
        self.free.extend(self.owned.pop(self.seq))
        return grant


class Prefill:
    """A borrower with `in_flight` open offers of other requests."""

    def __init__(self, in_flight: int) -> None:
        self.ledger = Ledger(PagePool(in_flight + SMALL), PagePool(in_flight + 8, "rows"))
        self.borrower = Borrower(P, self.ledger, max_records=1 << 30)
        self.borrower.on(LenderUp(D))
        self.borrower.on(LenderUp(D2))
        self.seq = self.counter = 0
        for _ in range(in_flight):
            self._open(1)

    def _open(self, pages: int, lender: int = D) -> Leg:
        self.seq += 1
        leg = Leg(TransferId(lender, self.seq), 0, 0, P)
        grant = Grant(0, 1, tuple(range(pages)))
        self.borrower.on(Heard(Offer(leg, 1, b"p", grant, pages * PAGE_SIZE, 0, 1000), lender))
        self.ledger.own(leg.tid, pages)
        self.borrower.on(Paired(leg, b"p"))
        return leg

    def _post(self, leg: Leg, pages: int) -> Post:
        (post,) = self.borrower.on(ChunkReady(leg, Chunk(self.ledger.pages(leg.tid)[:pages], 0)))
        assert isinstance(post, Post)
        return post

    def done(self, pages: int) -> None:
        """Offer, chunk, post, outcome, DONE, ACK."""
        leg = self._open(pages)
        post = self._post(leg, pages)
        self.borrower.on(Complete(leg, pages * PAGE_SIZE, FirstToken(1)))
        self.borrower.on(PostEnded(leg, post.number, Outcome.PLACED))
        self.borrower.on(Heard(Ack(leg), D))
        assert not self.ledger.knows(leg.tid)

    def drain(self, pages: int) -> None:
        """Offer, chunk, post, ABORT, outcome, DRAINED."""
        leg = self._open(pages)
        post = self._post(leg, pages)
        self.borrower.on(Heard(Abort(leg, "client gone"), D))
        self.borrower.on(PostEnded(leg, post.number, Outcome.PLACED))
        assert not self.ledger.knows(leg.tid)

    def forget(self, pages: int) -> None:
        """Offer, and the closed set of that lender."""
        leg = self._open(pages, D2)
        self.counter += 1
        self.borrower.on(Heard(Ping(D2, 0, 0, self.counter, self.seq, []), D2))
        assert self.borrower.record(leg) is None


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is in flight is not ours to walk
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def in_turns(works: dict[Any, Work], rounds: int, repeats: int) -> dict[Any, list[float]]:
    """Seconds of CPU for one call, `rounds` figures of each, taken in turn; each is the least of `repeats` calls."""
    times: dict[Any, list[float]] = {name: [] for name in works}
    with no_collector():
        for number in range(rounds + 1):
            for name, work in works.items():
                best = min(_once(work) for _ in range(repeats))
                if number:  # the first round warms up
                    times[name].append(best)
    return times


def _once(work: Work) -> float:
    begun = time.process_time_ns()
    work()
    return (time.process_time_ns() - begun) / 1e9


def ratio(times: dict[Any, list[float]], of: Any, to: Any) -> float:
    return median(a / b for a, b in zip(times[of], times[to], strict=True))


def request(rounds: int = 15, repeats: int = 15) -> dict[Any, list[float]]:
    """A 128K-token request: bare lists, commit, abort."""
    bare, decode = FreeList(4 * PAGES), Decode(4 * PAGES)
    works: dict[Any, Work] = {
        "bare": lambda: bare.cycle(PAGES) and None,
        "commit": lambda: decode.commit(PAGES),
        "abort": lambda: decode.abort(PAGES),
    }
    return in_turns(works, rounds, repeats)


def by_pool(pools: tuple[int, ...] = POOLS, rounds: int = 15, repeats: int = 15) -> dict[Any, list[float]]:
    works: dict[Any, Work] = {}
    for pool in pools:
        decode = Decode(pool)
        works["commit", pool] = lambda decode=decode: decode.commit(SMALL)
        works["abort", pool] = lambda decode=decode: decode.abort(SMALL)
    return in_turns(works, rounds, repeats)


def by_transfers(counts: tuple[int, ...] = IN_FLIGHT, rounds: int = 15, repeats: int = 15) -> dict[Any, list[float]]:
    works: dict[Any, Work] = {}
    for count in counts:
        decode, prefill = Decode(count + SMALL, count), Prefill(count)
        works["commit", count] = lambda decode=decode: decode.commit(SMALL)
        works["abort", count] = lambda decode=decode: decode.abort(SMALL)
        works["fence", count] = lambda decode=decode: decode.fence(SMALL)
        works["done", count] = lambda prefill=prefill: prefill.done(SMALL)
        works["drain", count] = lambda prefill=prefill: prefill.drain(SMALL)
        works["forget", count] = lambda prefill=prefill: prefill.forget(SMALL)
    return in_turns(works, rounds, repeats)


WORDS = {
    "commit": "decode: reserve, lease, land, release",
    "abort": "decode: reserve, lease, hold, proof",
    "fence": "decode: reserve, lease, peer lost, fence",
    "done": "prefill: offer, chunk, post, outcome, DONE, ACK",
    "drain": "prefill: offer, chunk, post, ABORT, outcome, DRAINED",
    "forget": "prefill: offer, closed set",
}


def growth_table(times: dict[Any, list[float]], what: str) -> tuple[str, bool]:
    sizes = sorted({size for _, size in times})
    lines = [f"microseconds by {what}".ljust(54) + "".join(f"{size:>12,}" for size in sizes) + "   last/first"]
    met = True
    for name in dict.fromkeys(name for name, _ in times):
        growth = ratio(times, (name, sizes[-1]), (name, sizes[0]))
        met &= growth <= GROWTH_GOAL
        figures = "".join(f"{median(times[name, size]) * 1e6:12.1f}" for size in sizes)
        lines.append(f"{WORDS[name]:<54}{figures}{growth:12.2f}")
    return "\n".join(lines), met


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-core ARGS=...", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="figures of each kind (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="pools to 10^6, transfers to 10^4")
    wanted = parser.parse_args()
    cut = 4 if wanted.quick else 5
    times = request(wanted.rounds)
    goals = []
    print(f"a request of {TOKENS:,} tokens ({PAGES:,} pages of {PAGE_SIZE}), microseconds")
    for name in times:
        against = ratio(times, name, "bare")
        print(f"  {WORDS.get(name, 'bare list operations'):<52}{median(times[name]) * 1e6:12.1f}{against:12.2f} x")
        goals.append((f"{name}: {against:.2f} of the bare list operations", against <= RATIO_GOAL))
    for table, met, what in (
        (*growth_table(by_pool(POOLS[:cut], wanted.rounds), "pages in the pool"), "the pool"),
        (*growth_table(by_transfers(IN_FLIGHT[:cut], wanted.rounds), "transfers in flight"), "transfers in flight"),
    ):
        print("\n" + table)
        goals.append((f"no operation grows with {what} (at most {GROWTH_GOAL} x over the whole range)", met))
    print()
    for text, met in goals[1:]:
        print(f"{'met   ' if met else 'MISSED'} {text}")
    return 0 if all(met for _, met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
