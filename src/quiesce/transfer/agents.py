"""A transport over any engine that can be lent peer by peer: NIXL, Mooncake, MORI. See `agent.Engine`.

The lender keeps one agent (NIXL) or engine (Mooncake, MORI) for each attached peer, all over the same pool, each
with addresses of its own. Ending a peer's agent is an exact fence of that peer, where the engine was shown to leave
nothing behind then; the peer attaches again by itself, under a new generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from quiesce.core.messages import Grant
from quiesce.transfer.agent import Engine
from quiesce.transfer.agent_lender import AgentLender
from quiesce.transfer.agent_poster import AgentPoster
from quiesce.transfer.couriers import Told
from quiesce.transfer.ends import TwoEnds
from quiesce.transfer.interface import (
    Access,
    Arena,
    Capabilities,
    FenceProof,
    Peer,
    Post,
    Region,
)
from quiesce.transfer.trial import trial
from quiesce.transfer.watch import Watch
from quiesce.transfer.window import check_arena

Use = Literal["push", "pull", "both"]  # "both" is for tests of engines
LEAVE_SECONDS = 3.0  # that agents may take to end when the process leaves


def used_for(engine: Engine, direction: Use) -> Capabilities:
    """Ending an agent fences a peer that writes; one that reads only where the engine survives that."""
    if direction == "pull" and not engine.caps.fences_readers:
        return replace(engine.caps, fence="none", fence_cost="none")
    return replace(engine.caps, pull=engine.caps.pull and direction != "push")


class AgentTransport(TwoEnds):
    """`host`: interface for peers on other machines, None: this machine only. Raises MissingEngine, and ValueError
    for settings that cannot work."""

    _lender: AgentLender
    _poster: AgentPoster

    def __init__(
        self,
        engine: Engine,
        run_dir: Path,
        epoch: int,
        *,
        host: str | None = None,
        direction: Use = "both",
        max_transfer_pages: int = 1024,
        max_open_posts: int = 4096,
        max_peers: int = 64,
    ) -> None:
        if max_transfer_pages < 1:
            raise ValueError(f"max_transfer_pages is {max_transfer_pages}, must be at least 1")
        engine.check()
        self.caps = used_for(engine, direction)
        self._direction: Use = direction
        self._engine, self._run_dir, self._host = engine, run_dir, host
        self._watch = Watch()
        self._told = Told()
        self._watch.add(self._told.flag, self._told.turn)
        self._lender = AgentLender(self._watch, self._told, engine, run_dir, epoch, host, max_peers)
        self._poster = AgentPoster(self._watch, self._told, engine, max_transfer_pages, max_open_posts, max_peers)
        self._clocked = (self._lender, self._poster)
        self._arena: Arena | None = None

    def self_test(self) -> list[str]:
        use: Use = "pull" if self._direction == "pull" else "push"
        wrong = trial(
            lambda epoch: AgentTransport(self._engine, self._run_dir, epoch, host=self._host, direction=use)
        )
        return [*self._engine.timeouts(), *wrong]

    def register(self, arena: Arena) -> Region:
        if self._arena is not None:
            raise ValueError("this transport has its arena already")
        check_arena(arena, self.caps.label)
        self._arena = arena
        self._lender.lend(arena)
        self._poster.use(arena)
        return Region(0, arena.count, arena.page_bytes)

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        return self._lender.descriptor(peer_epoch or 0)

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        if access == "read":
            self._lender.is_read(peer_epoch)
        return self.generation(peer_epoch)  # grants are checked against attachments, whoever numbers them

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        proof = self._lender.fence(peer_epoch, generation)
        reads = None if generation is None else self._poster.fence_reads(peer_epoch, generation)
        self._settle()
        if reads and generation is not None and not self._lender.knows(peer_epoch):
            return FenceProof("fenced", peer_epoch, generation)
        return None if reads is False else proof

    def gone(self, peer_epoch: int) -> FenceProof | None:
        return self._lender.gone(peer_epoch)

    def consume_barrier(self, pages: Sequence[int]) -> None:
        """Nothing to wait for: the memory of one host, written by its own processor or by a device that it sees."""

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        peer = self._poster.connect(descriptor, own_epoch)
        self._settle()
        return peer

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        post = self._poster.post("write", peer, src_pages, dst_pages, grant)
        self._settle()
        return post

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        post = self._poster.post("read", peer, dst_pages, src_pages, grant)
        self._settle()
        return post

    def drain(self, peer: Peer) -> bool:
        return self._poster.drained(peer)

    def used_up(self) -> str | None:
        return self._lender.used_up()

    def counters(self) -> dict[str, int]:
        return {**self._poster.counters, **self._lender.counters}

    def close_all(self) -> None:
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + LEAVE_SECONDS
        self._poster.close(LEAVE_SECONDS)
        self._lender.close(max(0.1, until - time.monotonic()))
        self._watch.close()
