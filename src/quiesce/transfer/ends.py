"""What transports have in common that keep a lender's end and a poster's end, woken by one `Watch`."""

from __future__ import annotations

import time
from typing import Protocol

from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Peer, PeerLost, Post, Transport
from quiesce.transfer.watch import Watch


class Clocked(Protocol):
    def tick(self, now: float) -> None: ...

    def next_deadline(self) -> float | None: ...


class LenderEnd(Protocol):
    lost: list[PeerLost]

    def generation(self, peer_epoch: int) -> int | None: ...


class PosterEnd(Clocked, Protocol):
    lost_peers: list[PeerLost]
    ended: list[tuple[Post, Outcome]]

    def try_cancel(self, post: Post) -> bool: ...

    def disconnect(self, peer: Peer) -> None: ...


class TwoEnds(Transport):
    """A subclass makes the four in its `__init__`. `_clocked`: the ends that have work at a time of their own."""

    _watch: Watch
    _lender: LenderEnd
    _poster: PosterEnd
    _clocked: tuple[Clocked, ...]
    _closed = False

    def fileno(self) -> int:
        return self._watch.fileno()

    def generation(self, peer_epoch: int) -> int | None:
        return self._lender.generation(peer_epoch)

    def events(self) -> list[PeerLost]:
        self._turn()
        lost = self._lender.lost + self._poster.lost_peers
        self._lender.lost, self._poster.lost_peers = [], []
        self._settle()
        return lost

    def poll(self) -> list[tuple[Post, Outcome]]:
        self._turn()
        ended, self._poster.ended = self._poster.ended, []
        self._settle()
        return ended

    def try_cancel(self, post: Post) -> bool:
        return self._poster.try_cancel(post)

    def disconnect(self, peer: Peer) -> None:
        self._poster.disconnect(peer)
        self._settle()

    def _turn(self) -> None:
        if self._closed:
            return
        self._watch.turn()
        now = time.monotonic()
        for end in self._clocked:
            end.tick(now)

    def _settle(self) -> None:
        """The descriptor is readable while there is something to hear, and once it is time for work."""
        if self._closed:
            return
        self._watch.flag(bool(self._lender.lost or self._poster.lost_peers or self._poster.ended))
        soonest = None  # asked for with every post, so without a list of them
        for end in self._clocked:
            due = end.next_deadline()
            if due is not None and (soonest is None or due < soonest):
                soonest = due
        self._watch.alarm(soonest)
