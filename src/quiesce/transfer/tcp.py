"""TCP between hosts: the process that owns the pages places the bytes itself, so its fence is exact.

Bytes are received straight into the pool and sent straight from it, on threads, over several connections a peer.
What the two sides can prove:

* PLACED: the lender has received every byte into its page, and said so.
* FAILED_CLEAN: refused by the lender, or its connections were lost and it has since said, by taking new ones, that
  the old ones have ended; or nobody listens at its address any more, which is fresh for each process.
* UNKNOWN: only for what is under way when the transport itself is closed.
* The death of a poster is no fence: what is in the lender's socket buffers is still to come. `fence` is one: it
  shuts the gates of those pages and waits for the one system call that may be under way; later bytes go nowhere.
  Nothing has to be known of the poster for it, which may be dead, stopped or out of reach.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quiesce.core.messages import Grant
from quiesce.transfer import tcp_wire as wire
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.ends import TwoEnds
from quiesce.transfer.inbox import Inbox
from quiesce.transfer.interface import (
    Access,
    Arena,
    Capabilities,
    FenceProof,
    Peer,
    Post,
    Region,
)
from quiesce.transfer.tcp_lender import TcpLender
from quiesce.transfer.tcp_poster import TcpPoster
from quiesce.transfer.tcp_tls import Tls
from quiesce.transfer.tcp_wire import Kind
from quiesce.transfer.trial import trial
from quiesce.transfer.watch import Watch

CAPABILITIES = Capabilities(
    name="tcp",
    push=True,
    pull=True,
    gather=True,
    notify=False,
    failure_is_terminal=True,
    cancels_queued=True,
    blocking_post=False,
    drain="per_post",
    fence="page",
    fence_cost="us",
    placed_means="visible",
)
CLOSE_SECONDS = 2.0
WILDCARDS = ("", "0.0.0.0", "::", "*")


class TcpTransport(TwoEnds):
    """Lends and posts pages of one arena. `host`: the address of this host that peers reach, and the only one that is
    listened at. `lanes`: connections a peer, each with a thread at either end. Raises ValueError for settings that
    cannot work."""

    caps = CAPABILITIES

    _lender: TcpLender
    _poster: TcpPoster

    def __init__(
        self,
        epoch: int,
        *,
        host: str = "127.0.0.1",
        lanes: int = 2,
        max_transfer_pages: int = 1024,
        max_open_posts: int = 4096,
        max_peers: int = 256,
        tls: Tls | None = None,
    ) -> None:
        if host in WILDCARDS:
            raise ValueError(f"tcp listens at one address that its peers reach, not at {host!r}: name it")
        if not 1 <= lanes <= wire.MAX_LANES:
            raise ValueError(f"lanes is {lanes}, must be in 1..{wire.MAX_LANES}")
        if not 1 <= max_transfer_pages <= wire.MAX_JOB_PAGES:
            raise ValueError(f"max_transfer_pages is {max_transfer_pages}, must be in 1..{wire.MAX_JOB_PAGES}")
        server, client = (None, None) if tls is None else tls.contexts()
        self._host, self._tls = host, tls
        self._watch = Watch()
        self._inbox = Inbox(self._watch)
        self._lender = TcpLender(self._watch, self._inbox, epoch, host, max_peers, lanes, server)
        self._poster = TcpPoster(self._watch, self._inbox, max_transfer_pages, max_open_posts, max_peers, client)
        self._clocked = (self._poster,)
        self._arena: Arena | None = None
        self._newest_read: dict[int, int] = {}  # lender's epoch -> newest generation that we read under

    def self_test(self) -> list[str]:
        return trial(lambda epoch: TcpTransport(epoch, host=self._host, lanes=1, tls=self._tls))

    def register(self, arena: Arena) -> Region:
        if self._arena is not None:
            raise ValueError("this transport has its arena already")
        if not arena.pages.flags.c_contiguous:
            raise ValueError("tcp needs an arena whose pages lie one after the other")
        self._arena = arena
        self._lender.lend_arena(arena)
        self._poster.use(arena)
        return Region(0, arena.count, arena.page_bytes)

    # ------------------------------------------------------------ the side whose memory is touched

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return msgspec.msgpack.encode(self._lender.descriptor(peer_epoch))

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        return self._lender.lend(peer_epoch, tuple(pages), access, generation)

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        self._lender.withdraw(peer_epoch, generation)

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        """Always to be had, at once: for posts into our pages, and for our own reads into them."""
        newest = max(self._lender.permits.newest, self._newest_read.get(peer_epoch, 0))
        generation = newest if generation is None else generation
        if generation > newest:  # never handed out: nothing to revoke, nothing to prove
            return None
        self._lender.revoke(peer_epoch, generation, pages)
        self._poster.fence_reads(peer_epoch, generation, pages)
        return FenceProof("fenced", peer_epoch, generation, pages)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        """A dead poster's bytes may still be on their way: `fence` is what proves something."""
        return None

    def consume_barrier(self, pages: Sequence[int]) -> None:
        """Nothing to wait for: the bytes were stored by this process."""

    # ------------------------------------------------------------ both sides

    def counters(self) -> dict[str, int]:
        return dict(
            Counter(self._poster.counters) + self._lender.counters + Counter(late_bytes=self._lender.late_bytes())
        )

    # ------------------------------------------------------------ the side that posts

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        return self._poster.connect(descriptor, own_epoch)

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        post = self._poster.post(Kind.WRITE, peer, src_pages, dst_pages, grant)
        self._settle()
        return post

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        known = self._newest_read
        known[peer.epoch] = max(grant.generation, known.pop(peer.epoch, 0))  # newest last
        if len(known) > 4096:
            del known[next(iter(known))]
        post = self._poster.post(Kind.READ, peer, dst_pages, src_pages, grant)
        self._settle()
        return post

    def drain(self, peer: Peer) -> bool:
        return self._poster.open_posts(peer) == 0

    def close_all(self) -> None:
        if self._closed:
            return
        self._poster.close()
        self._lender.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._poster.busy and time.monotonic() < deadline:
            self._watch.turn(0.05)
        self._closed = True
        self._inbox.close()
        self._watch.close()


def factory(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[TcpTransport, Arena]:
    """For the conformance suite: `quiesce.transfer.tcp:factory`."""
    return TcpTransport(epoch, max_transfer_pages=100), shared_arena(pages, page_bytes)
