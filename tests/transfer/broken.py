"""Transports that claim too much, for showing that the conformance suite notices. Named by PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

from quiesce.core.messages import Grant
from quiesce.transfer import shm
from quiesce.transfer.interface import Arena, FenceProof, Outcome, Post


class FenceByWord(shm.ShmTransport):
    """States a fence without killing anything."""

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        current = self.generation(peer_epoch)
        return None if current is None else FenceProof("fenced", peer_epoch, generation or current)


class GoneTooSoon(shm.ShmTransport):
    """Takes any attachment for a dead one."""

    def gone(self, peer_epoch: int) -> FenceProof | None:
        current = self.generation(peer_epoch)
        return None if current is None else FenceProof("gone", peer_epoch, current)


class PlacedByWord(shm.ShmTransport):
    """Reports PLACED for what it has only accepted."""

    def write(self, peer, src_pages, dst_pages, grant) -> Post:  # type: ignore[no-untyped-def]
        self._accepted = [*getattr(self, "_accepted", []), Post(id(src_pages), peer)]
        return self._accepted[-1]

    def poll(self) -> list[tuple[Post, Outcome]]:
        accepted, self._accepted = getattr(self, "_accepted", []), []
        super().poll()
        return [(post, Outcome.PLACED) for post in accepted]


class AnyGeneration(shm.ShmTransport):
    """Writes under whatever generation is current, not under the one that was granted."""

    def write(self, peer, src_pages, dst_pages, grant) -> Post:  # type: ignore[no-untyped-def]
        attached = self._poster._lenders[peer.number].generation
        return super().write(peer, src_pages, dst_pages, Grant(grant.region, attached, grant.pages))


def _factory(kind: type[shm.ShmTransport]):  # type: ignore[no-untyped-def]
    def make(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[shm.ShmTransport, Arena]:
        return kind(run_dir, epoch), shm.shared_arena(pages, page_bytes)

    return make


fence_by_word = _factory(FenceByWord)
gone_too_soon = _factory(GoneTooSoon)
placed_by_word = _factory(PlacedByWord)
any_generation = _factory(AnyGeneration)
