"""What a transport can show of itself at start-up: two of them in this process, over scratch memory.

It is a sample, not the proof: that is the conformance suite. But a machine on which the claims do not hold in the
plainest case is found before it serves.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Peer, Post, Transport

PAGES, PAGE_BYTES = 4, 4096
# For each step, a thousand times what it takes: on a busy machine it may wait its turn for long, and an attachment
# that was given up (`attach.ATTACH_SECONDS`) is tried again twice. Only an engine that does not work waits for it.
SECONDS = 30.0
LENDER, POSTER = 0xA1, 0xA2


class _Pair:
    """A lender whose pages are 0 and a poster whose page i is all i + 1."""

    def __init__(self, make: Callable[[int], Transport]) -> None:
        self.lender, self.poster = make(LENDER), make(POSTER)
        self.theirs, self.own = shared_arena(PAGES, PAGE_BYTES), shared_arena(PAGES, PAGE_BYTES)
        self.own.pages[:] = [[page + 1] for page in range(PAGES)]
        self.ended: dict[int, Outcome] = {}

    def until(self, condition: Callable[[], Any]) -> Any:
        """The condition's first true value; None once the time is over."""
        deadline = time.monotonic() + SECONDS
        while True:
            for side in (self.lender, self.poster):
                self.ended.update({post.id: outcome for post, outcome in side.poll() if side is self.poster})
                side.events()
            value = condition()
            if value or time.monotonic() > deadline:
                return value or None
            select.select([self.lender, self.poster], [], [], 0.05)

    def lend(self, access: Any) -> Grant | None:
        pages = tuple(range(PAGES))
        numbered = 1 if access == "read" else None
        generation = self.until(lambda: self.lender.lend(POSTER, pages, access=access, generation=numbered))
        return None if generation is None else Grant(0, generation, pages)

    def outcome(self, post: Post) -> Outcome | None:
        ended: Outcome | None = self.until(lambda: self.ended.get(post.id))
        return ended


def trial(make: Callable[[int], Transport]) -> list[str]:
    """`make(epoch)` gives a transport of its own. What did not hold, for people; empty: all did. Raises what `make`
    raises."""
    pair = _Pair(make)
    try:
        pair.lender.register(pair.theirs)
        pair.poster.register(pair.own)
        return _tried(pair, pair.poster.connect(pair.lender.descriptor(POSTER), POSTER))
    finally:
        pair.poster.close_all()
        pair.lender.close_all()


def _tried(pair: _Pair, peer: Peer) -> list[str]:
    caps = pair.lender.caps
    grant = pair.lend("write")
    if grant is None:
        return [f"two of them in one process did not get together within {SECONDS:.0f} s"]
    ended = pair.outcome(pair.poster.write(peer, [2], [1], grant))
    if ended is not Outcome.PLACED:
        return [f"a write within this process was not placed within {SECONDS:.0f} s ({ended})"]
    pair.lender.consume_barrier([1])
    wrong = [] if (pair.theirs.pages[1] == 3).all() else ["PLACED does not mean that the bytes are there"]
    if caps.pull:
        readable = pair.lend("read")
        if readable is None or pair.outcome(pair.poster.read(peer, [0], [1], readable)) is not Outcome.PLACED:
            wrong.append("pull is claimed, and a read was not placed")
        elif not (pair.own.pages[0] == pair.theirs.pages[1]).all():
            wrong.append("a read that was PLACED has brought other bytes")
    if caps.fence in ("page", "peer"):
        proof = pair.until(lambda: pair.lender.fence(POSTER, grant.generation, frozenset(grant.pages)))
        if proof is None:
            return [*wrong, f"a fence is claimed ({caps.fence}), and none was to be had"]
        pair.theirs.pages[:] = 0
        if pair.outcome(pair.poster.write(peer, [3], [1], grant)) is Outcome.PLACED or pair.theirs.pages.any():
            wrong.append("a write under a fenced grant has landed")
    return wrong
