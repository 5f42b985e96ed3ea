"""The transport of probes and warm-ups: it moves nothing and says so at once, through the same interface."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Arena, Capabilities, FenceProof, Peer, PeerLost, Post, Region, Transport

_GENERATION = 1  # nothing is ever written, so there is nothing to tell apart


class _Descriptor(msgspec.Struct, frozen=True):
    kind: str
    epoch: int


_decoder = msgspec.msgpack.Decoder(_Descriptor)


class NullTransport(Transport):
    """Every post is PLACED with nothing moved; every proof is true because nothing is ever in flight."""

    caps = Capabilities(
        name="null",
        push=True,
        pull=True,
        gather=True,
        notify=False,
        failure_is_terminal=True,
        cancels_queued=False,
        blocking_post=False,
        drain="per_post",
        fence="peer",
        fence_cost="none",
        placed_means="visible",
    )

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._ready = -1  # made when somebody means to wait for it
        self._ended: list[tuple[Post, Outcome]] = []
        self._last = 0

    def fileno(self) -> int:
        if self._ready < 0:
            self._ready = os.eventfd(len(self._ended), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._ready

    def close_all(self) -> None:
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def register(self, arena: Arena) -> Region:
        return Region(0, arena.count, arena.page_bytes)

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return msgspec.msgpack.encode(_Descriptor("null", self._epoch))

    def generation(self, peer_epoch: int) -> int | None:
        return _GENERATION

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        return FenceProof("fenced", peer_epoch, _GENERATION)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        return FenceProof("gone", peer_epoch, _GENERATION)

    def consume_barrier(self, pages: Sequence[int]) -> None:
        """Nothing was moved."""

    def events(self) -> list[PeerLost]:
        return []

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        try:
            found = _decoder.decode(descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"not the descriptor of a null transport: {error}") from error
        if found.kind != "null":
            raise ValueError(f"not the descriptor of a null transport: {found.kind!r}")
        return Peer(found.epoch, 0)

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        return self._post(peer, src_pages, dst_pages, grant)

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        return self._post(peer, dst_pages, src_pages, grant)

    def _post(self, peer: Peer, own: Sequence[int], theirs: Sequence[int], grant: Grant) -> Post:
        self._last += 1
        post = Post(self._last, peer)
        known = grant.generation == _GENERATION and len(own) == len(theirs)
        granted = known and frozenset(grant.pages).issuperset(theirs)
        if not self._ended and self._ready >= 0:
            os.eventfd_write(self._ready, 1)
        self._ended.append((post, Outcome.PLACED if granted else Outcome.FAILED_CLEAN))
        return post

    def poll(self) -> list[tuple[Post, Outcome]]:
        ended, self._ended = self._ended, []
        if ended and self._ready >= 0:
            os.eventfd_read(self._ready)
        return ended

    def try_cancel(self, post: Post) -> bool:
        return False

    def drain(self, peer: Peer) -> bool:
        return True

    def disconnect(self, peer: Peer) -> None:
        """There is no connection to end."""
