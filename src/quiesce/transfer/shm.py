"""Shared memory on one machine: both pools are memfds, a mover process copies, its death is the fence."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from quiesce.core.messages import Grant
from quiesce.transfer import copying
from quiesce.transfer import mover_wire as wire
from quiesce.transfer.arena import SEALS, shared_arena
from quiesce.transfer.ends import TwoEnds
from quiesce.transfer.interface import Arena, Capabilities, FenceProof, Peer, Post, Region
from quiesce.transfer.shm_lender import Lender, Lets
from quiesce.transfer.shm_poster import STALL_SECONDS, Poster
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

CAPABILITIES = Capabilities(
    name="shm",
    push=True,
    pull=True,
    gather=True,
    notify=False,
    failure_is_terminal=True,
    cancels_queued=True,
    blocking_post=False,
    drain="per_post",
    fence="death",
    fence_cost="disrupts_peer",
    placed_means="visible",
)

Direction = Literal["push", "pull", "both"]
LETS: dict[Direction, Lets] = {"push": "write", "pull": "read", "both": "both"}


class ShmTransport(TwoEnds):
    """Lends and posts pages of one arena. `run_dir` holds the listening socket (mode 0600, fresh name).

    `direction`: in push movers write into what is lent and only read from their own engine's pool; in pull the other
    way round; "both" is for tests of the transport itself.

    A mover that has work and is silent for `stall_seconds` is killed: what it had not placed ends FAILED_CLEAN.
    A mover dies with the *thread* that connects first, so let the engine's main thread own the transport.
    Raises ValueError for settings that cannot work.
    """

    caps = CAPABILITIES

    _lender: Lender
    _poster: Poster

    def __init__(
        self,
        run_dir: Path,
        epoch: int,
        *,
        max_transfer_pages: int = 1024,
        max_open_posts: int = 4096,
        max_peers: int = 256,
        stall_seconds: float = STALL_SECONDS,
        direction: Direction = "push",
    ) -> None:
        if not 1 <= max_transfer_pages <= wire.MAX_JOB_PAGES:
            raise ValueError(f"max_transfer_pages is {max_transfer_pages}, must be in 1..{wire.MAX_JOB_PAGES}")
        self._watch = Watch()
        self._lender = Lender(self._watch, run_dir, epoch, max_peers, LETS[direction])
        reads = direction != "push"
        self._poster = Poster(self._watch, max_transfer_pages, max_open_posts, max_peers, stall_seconds, reads)
        self._clocked = (self._lender, self._poster)
        self._arena: Arena | None = None

    def self_test(self) -> list[str]:
        """What the kernel must have: sealed memory files and process descriptors."""
        try:
            arena = shared_arena(1, 4096)
            os.close(arena.fd if arena.fd is not None else -1)
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return [f"this kernel lacks what shm needs, memfd_create with seals or pidfd_open: {error}"]
        return []

    def register(self, arena: Arena) -> Region:
        if self._arena is not None:
            raise ValueError("this transport has its arena already")
        if arena.fd is None:
            raise ValueError("shm needs an arena in shared memory: make it with shared_arena()")
        if fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("the arena can change its size under a mover: make it with shared_arena()")
        if slower := copying.choose()[2]:
            log.warning("pages are copied by numpy, which is slower: %s", slower)
        self._arena = arena
        self._lender.lend(arena, 0)
        self._poster.use(arena)
        return Region(0, arena.count, arena.page_bytes)

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return self._lender.descriptor()

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        proof = self._lender.fence(peer_epoch, generation)
        reads = generation is not None and self._poster.fence(peer_epoch, generation)
        if reads and generation is not None and not self._lender.knows(peer_epoch):
            proof = FenceProof("fenced", peer_epoch, generation)
        self._settle()
        return proof

    def gone(self, peer_epoch: int) -> FenceProof | None:
        proof = self._lender.gone(peer_epoch)
        self._settle()
        return proof

    def consume_barrier(self, pages: Sequence[int]) -> None:
        """Nothing to wait for: one coherent memory."""

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        return self._poster.connect(descriptor, own_epoch)

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        post = self._poster.write(peer, src_pages, dst_pages, grant)
        self._settle()
        return post

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        post = self._poster.read(peer, dst_pages, src_pages, grant)
        self._settle()
        return post

    def drain(self, peer: Peer) -> bool:
        return self._poster.open_posts(peer) == 0

    def report(self) -> dict[str, Any]:
        return {**super().report(), "copies": copying.choose()[1]}

    def counters(self) -> dict[str, int]:
        """Totals since the start, for the metrics."""
        return {**self._poster.counters, "attach_refused": self._lender.refused}

    def close_all(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lender.close()
        self._poster.close()
        self._watch.close()


def factory(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[ShmTransport, Arena]:
    """For the conformance suite: `quiesce.transfer.shm:factory`."""
    return ShmTransport(run_dir, epoch, max_transfer_pages=100, direction="both"), shared_arena(pages, page_bytes)
