"""Two transports in this process, lender and poster, with a real mover between them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce.core.messages import Grant
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Outcome, Peer, PeerLost, Post
from quiesce.transfer.shm import ShmTransport

PAGES, PAGE_BYTES = 64, 4096
ALL = list(range(PAGES))
PATIENCE = 60.0


class Side:
    """One transport with what it has reported so far."""

    def __init__(self, run_dir: Path, epoch: int, **settings: Any) -> None:
        self.epoch = epoch
        self.transport = ShmTransport(run_dir, epoch, **settings)
        self.arena = shared_arena(PAGES, PAGE_BYTES)
        self.transport.register(self.arena)
        self.ended: dict[Post, Outcome] = {}
        self.lost: list[PeerLost] = []

    def turn(self) -> None:
        for post, outcome in self.transport.poll():
            assert post not in self.ended, "an outcome is told once"
            self.ended[post] = outcome
        self.lost += self.transport.events()

    @property
    def mover_pid(self) -> int:
        mover = self.transport._poster._mover
        assert mover is not None
        return mover.pid


class Pair:
    def __init__(self, run_dir: Path, **settings: int) -> None:
        self.run_dir = run_dir
        self.sides: list[Side] = []
        self.lender = self.side(0xD)
        self.poster = self.side(0xB, **settings)
        self.poster.arena.pages[:] = np.arange(1, PAGES + 1, dtype=np.uint8)[:, None]

    def side(self, epoch: int, **settings: Any) -> Side:
        self.sides.append(Side(self.run_dir, epoch, **settings))
        return self.sides[-1]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits on the transports' own descriptors, so that a missed wake-up fails as well."""
        deadline = time.monotonic() + PATIENCE
        poller = select.poll()
        for side in self.sides:
            poller.register(side.transport.fileno(), select.POLLIN)
        while True:
            for side in self.sides:
                side.turn()
            value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            poller.poll(1000)

    def attach(self, lender: Side | None = None) -> Peer:
        lender = lender or self.lender
        peer = self.poster.transport.connect(lender.transport.descriptor(), self.poster.epoch)
        self.until(lambda: lender.transport.generation(self.poster.epoch), "the attachment")
        return peer

    def grant(self, pages: list[int] = ALL, lender: Side | None = None) -> Grant:
        generation = (lender or self.lender).transport.generation(self.poster.epoch)
        assert generation is not None
        return Grant(0, generation, tuple(pages))

    def outcome(self, post: Post) -> Outcome:
        return self.until(lambda: self.poster.ended.get(post), f"the outcome of {post}")

    def close(self) -> None:
        for side in self.sides:
            side.transport.close_all()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()
