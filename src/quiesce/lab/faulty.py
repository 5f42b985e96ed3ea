"""A transport that misbehaves on purpose: it holds writes back, slows them down, loses their outcome or fails them.

It wraps any transport and adds no way to touch memory: every byte still goes through the inner one, under the
grant it was posted with. Which fate a write meets is decided by a function, see `Fate` and `seeded`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Access, Arena, FenceProof, Peer, PeerLost, Post, Region, Transport
from quiesce.transfer.watch import Watch


@dataclass(frozen=True)
class Fate:
    """What happens to one write. The default: nothing unusual."""

    hold: bool = False  # neither executed nor reported until `release`
    ms_per_page: float = 0.0  # pages land one by one, so many milliseconds apart; 0: in one piece
    tell_unknown: bool = False  # the outcome is UNKNOWN at once, and the write goes on
    fail_after: int | None = None  # fails clean after so many pages have landed


Decide = Callable[[int], Fate]  # number of pages of the write -> its fate
Make = Callable[[Peer, Sequence[int], Sequence[int], Grant], Post]  # the inner transport's `write` or `read`


def seeded(
    seed: int,
    *,
    hold: float = 0.0,
    unknown: float = 0.0,
    fail: float = 0.0,
    ms_per_page: tuple[float, float] = (0.0, 0.0),
) -> Decide:
    """Draws fates by these probabilities, and each write's pace evenly from `ms_per_page`."""
    draw = random.Random(seed)

    def decide(pages: int) -> Fate:
        held, lost, failing = draw.random() < hold, draw.random() < unknown, draw.random() < fail
        pace, after = draw.uniform(*ms_per_page), draw.randint(0, max(0, pages - 1))
        return Fate(held, pace, lost, after if failing else None)

    return decide


@dataclass
class _Write:
    """One write, or one read."""

    post: Post
    make: Make  # of the inner transport
    first: list[int]  # its page lists, in the order of its arguments
    second: list[int]
    grant: Grant
    reads: bool
    fate: Fate
    held: bool
    limit: int  # pages that will be handed on, all told
    handed: int = 0
    due: float = 0.0  # when the next page goes, in seconds of the clock
    inner: set[int] = field(default_factory=set)  # inner posts not ended
    worst: Outcome = Outcome.PLACED
    told: bool = False

    @property
    def over(self) -> bool:
        return self.handed >= self.limit and not self.inner


class FaultyTransport(Transport):
    """Wraps `inner`; `decide` gives each post its fate. With a `clock` of your own, call `poll` to advance.
    `proves=False`: an engine that can prove nothing, neither fence nor death nor drain, and says so."""

    def __init__(
        self,
        inner: Transport,
        decide: Decide,
        *,
        clock: Callable[[], float] = time.monotonic,
        proves: bool = True,
    ) -> None:
        self.caps = inner.caps if proves else replace(inner.caps, fence="none", fence_cost="none", drain="none")
        self._proves = proves
        self._inner = inner
        self._decide = decide
        self._clock = clock
        self._writes: dict[int, _Write] = {}  # by our post id, in order of posting
        self._by_inner: dict[int, _Write] = {}
        self._busy_until: dict[int, float] = {}  # by Peer.number: one slow wire for each peer
        self._ended: list[tuple[Post, Outcome]] = []
        self._last = 0
        self._closed = False
        self._watch = Watch()
        self._watch.add(inner.fileno(), lambda: None)

    # ------------------------------------------------------------ the test's hands

    def held(self) -> list[Post]:
        return [write.post for write in self._writes.values() if write.held]

    def release(self, post: Post | None = None) -> None:
        """Let one held write go, or all of them."""
        for write in list(self._writes.values()):
            if write.held and post in (None, write.post):
                write.held = False
                self._schedule(write)
        self._advance()

    # ------------------------------------------------------------ posting

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        return self._begin(self._inner.write, peer, src_pages, dst_pages, grant, reads=False)

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        return self._begin(self._inner.read, peer, dst_pages, src_pages, grant, reads=True)

    def _begin(
        self, make: Make, peer: Peer, first: Sequence[int], second: Sequence[int], grant: Grant, reads: bool
    ) -> Post:
        self._last += 1
        fate = self._decide(len(first))
        limit = max(len(first), len(second), 1)
        if fate.fail_after is not None:
            limit = min(limit, fate.fail_after)
        post = Post(self._last, peer)
        write = _Write(post, make, list(first), list(second), grant, reads, fate, fate.hold, limit)
        self._writes[write.post.id] = write
        if fate.tell_unknown:
            self._tell(write, Outcome.UNKNOWN)
        if not write.held:
            self._schedule(write)
        self._advance()
        return write.post

    def _schedule(self, write: _Write) -> None:
        start = max(self._clock(), self._busy_until.get(write.post.peer.number, 0.0))
        pace = write.fate.ms_per_page / 1000
        write.due = start + pace
        self._busy_until[write.post.peer.number] = start + pace * write.limit

    def _advance(self) -> None:
        if self._closed:
            return
        now = self._clock()
        for write in list(self._writes.values()):
            if not write.held:
                self._hand_on(write, now)
                self._conclude(write)
        self._settle()

    def _hand_on(self, write: _Write, now: float) -> None:
        """Give the inner transport every page that is due."""
        pace = write.fate.ms_per_page / 1000
        while write.handed < write.limit and write.due <= now:
            step = 1 if pace else write.limit
            part = slice(write.handed, write.handed + step)
            write.handed += step
            write.due += pace
            inner = write.make(write.post.peer, write.first[part], write.second[part], write.grant)
            write.inner.add(inner.id)
            self._by_inner[inner.id] = write

    def _conclude(self, write: _Write) -> None:
        if not write.over or write.post.id not in self._writes:
            return
        del self._writes[write.post.id]
        failed = write.fate.fail_after is not None and write.worst is Outcome.PLACED
        self._tell(write, Outcome.FAILED_CLEAN if failed else write.worst)

    def _tell(self, write: _Write, outcome: Outcome) -> None:
        if not write.told:
            write.told = True
            self._ended.append((write.post, outcome))

    def _settle(self) -> None:
        self._watch.flag(bool(self._ended))
        if self._clock is time.monotonic:
            waiting = [w.due for w in self._writes.values() if not w.held and w.handed < w.limit]
            self._watch.alarm(min(waiting, default=None))

    def poll(self) -> list[tuple[Post, Outcome]]:
        self._advance()
        for inner, outcome in self._inner.poll():
            write = self._by_inner.pop(inner.id)
            write.inner.discard(inner.id)
            if outcome is not Outcome.PLACED:
                write.limit = write.handed  # the first failure ends the loop
                write.worst = outcome if write.worst is not Outcome.UNKNOWN else write.worst
            self._conclude(write)
        ended, self._ended = self._ended, []
        if not self._closed:
            self._settle()
        return ended

    def try_cancel(self, post: Post) -> bool:
        write = self._writes.get(post.id)
        if write is None or write.told or write.handed:
            return False
        del self._writes[post.id]
        return True

    def drain(self, peer: Peer) -> bool:
        """Writes that were reported as UNKNOWN count for as long as they really go on."""
        return (
            self._proves and self._inner.drain(peer) and not any(w.post.peer == peer for w in self._writes.values())
        )

    def disconnect(self, peer: Peer) -> None:
        self._inner.disconnect(peer)
        self._stop(lambda write: write.post.peer == peer)
        self._advance()

    def _stop(self, chosen: Callable[[_Write], bool]) -> None:
        for write in self._writes.values():
            if chosen(write) and write.handed < write.limit:
                write.limit, write.held = write.handed, False
                write.worst = Outcome.FAILED_CLEAN

    def close_all(self) -> None:
        if self._closed:
            return
        self._inner.close_all()
        self._stop(lambda write: True)
        for write in list(self._writes.values()):
            self._conclude(write)
        self._closed = True
        self._watch.close()

    # ------------------------------------------------------------ passed on unchanged

    def fileno(self) -> int:
        return self._watch.fileno()

    def register(self, arena: Arena) -> Region:
        return self._inner.register(arena)

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return self._inner.descriptor(peer_epoch)

    def reply(self, peer_epoch: int, descriptor: bytes, *, pull: bool = False) -> bytes:
        return self._inner.reply(peer_epoch, descriptor, pull=pull)

    def settle(self, peer_epoch: int, reply: bytes) -> None:
        self._inner.settle(peer_epoch, reply)

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        return self._inner.lend(peer_epoch, pages, access=access, generation=generation)

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        self._inner.withdraw(peer_epoch, generation)

    def self_test(self) -> list[str]:
        return self._inner.self_test()

    def report(self) -> dict[str, Any]:
        return self._inner.report()

    def picks(self) -> tuple[str, ...]:
        return self._inner.picks()

    def used_up(self) -> str | None:
        return self._inner.used_up()

    def counters(self) -> dict[str, int]:
        return self._inner.counters()

    def generation(self, peer_epoch: int) -> int | None:
        return self._inner.generation(peer_epoch)

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        """Own reads that are still to be handed on are revoked with those that were."""
        if not self._proves:
            return None
        proof = self._inner.fence(peer_epoch, generation, pages)
        if proof is not None:
            upto = proof.generation
            self._stop(lambda w: w.reads and w.post.peer.epoch == peer_epoch and w.grant.generation <= upto)
            self._advance()
        return proof

    def gone(self, peer_epoch: int) -> FenceProof | None:
        return self._inner.gone(peer_epoch) if self._proves else None

    def consume_barrier(self, pages: Sequence[int]) -> None:
        self._inner.consume_barrier(pages)

    def events(self) -> list[PeerLost]:
        return self._inner.events()

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        return self._inner.connect(descriptor, own_epoch)
