"""Transports that claim too much, for showing that the conformance suite notices. Named by PYTHONPATH."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from quiesce.core.messages import Grant
from quiesce.transfer import shm, tcp
from quiesce.transfer.interface import Arena, FenceProof, Outcome, Peer, Post, Region
from quiesce.transfer.tcp_stream import Gate


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


class OpenGates(tcp.TcpTransport):
    """States a fence and shuts nothing."""

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        newest = self._lender.permits.newest
        return FenceProof("fenced", peer_epoch, newest if generation is None else generation, pages)


class LendsAll(tcp.TcpTransport):
    """Takes what a peer says was lent to it for what was."""

    def register(self, arena: Arena) -> Region:
        everything = Gate(frozenset(range(arena.count)))
        self._lender._gate = lambda *_: everything  # type: ignore[method-assign]
        return super().register(arena)


class CleanByWord(tcp.TcpTransport):
    """Calls its posts failed and over as soon as their connection is given up."""

    def disconnect(self, peer: Peer) -> None:
        poster = self._poster
        target = poster._targets[peer.number]
        for total in target.posts:
            if poster._open.pop(total.post.id, None) is not None:
                poster.ended.append((total.post, Outcome.FAILED_CLEAN))
        self._settle()


class CancelsByWord(tcp.TcpTransport):
    """Says of any post that it never started."""

    def try_cancel(self, post: Post) -> bool:
        return True


class ForgetsNothing(tcp.TcpTransport):
    """Keeps something of every post."""

    def write(self, peer, src_pages, dst_pages, grant) -> Post:  # type: ignore[no-untyped-def]
        self.__dict__.setdefault("_kept", []).append(bytearray(1024))
        return super().write(peer, src_pages, dst_pages, grant)


WARM = 2000  # posts, before which the suite does not look


class LendsForGood(tcp.TcpTransport):
    """Keeps something of all that it ever lent. From the kernel: a process that tests much has memory to spare."""

    def lend(self, peer_epoch, pages, **more) -> int | None:  # type: ignore[no-untyped-def]
        kept = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kept[0] = 1
        self.__dict__.setdefault("_kept", []).append(kept)
        return super().lend(peer_epoch, pages, **more)


class Counts(tcp.TcpTransport):
    posted = 0

    def write(self, peer, src_pages, dst_pages, grant) -> Post:  # type: ignore[no-untyped-def]
        self.posted += 1
        self.at(self.posted - WARM)
        return super().write(peer, src_pages, dst_pages, grant)

    def at(self, number: int) -> None: ...


class LeaksFiles(Counts):
    """Of each post after the warm-up one stays open."""

    def at(self, number: int) -> None:
        if number > 0:
            os.dup(0)


class LeaksThreads(Counts):
    """Of some posts after the warm-up a thread stays."""

    def at(self, number: int) -> None:
        if number > 0 and number % 100 == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()


class PoolGrows(Counts):
    """Its pool grows by 2 MiB twice after the warm-up, in different rounds of 500, and then no more."""

    pool: tuple[bytes, ...] = ()

    def at(self, number: int) -> None:
        if number in (100, 600):
            self.pool += (b"x" * (2 << 20),)


def _tcp_factory(kind: type[tcp.TcpTransport]):  # type: ignore[no-untyped-def]
    def make(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[tcp.TcpTransport, Arena]:
        return kind(epoch, max_transfer_pages=100), shm.shared_arena(pages, page_bytes)

    return make


open_gates = _tcp_factory(OpenGates)
lends_all = _tcp_factory(LendsAll)
clean_by_word = _tcp_factory(CleanByWord)
cancels_by_word = _tcp_factory(CancelsByWord)
forgets_nothing = _tcp_factory(ForgetsNothing)
lends_for_good = _tcp_factory(LendsForGood)
leaks_files = _tcp_factory(LeaksFiles)
leaks_threads = _tcp_factory(LeaksThreads)
pool_grows = _tcp_factory(PoolGrows)


def _factory(kind: type[shm.ShmTransport]):  # type: ignore[no-untyped-def]
    def make(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[shm.ShmTransport, Arena]:
        return kind(run_dir, epoch), shm.shared_arena(pages, page_bytes)

    return make


fence_by_word = _factory(FenceByWord)
gone_too_soon = _factory(GoneTooSoon)
placed_by_word = _factory(PlacedByWord)
any_generation = _factory(AnyGeneration)
