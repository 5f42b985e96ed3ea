"""One process of the conformance suite: a transport at the far end of a pipe, driven by lines of JSON."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer import registry
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena, Peer, Post, Transport
from quiesce.transfer.leaving import leave

STORM_DEPTH = 4  # posts kept in flight
WINDOW = 64  # posts of `burst` under way


def load(engine: str, run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[Transport, Arena]:
    """Jobs of at most 100 pages, so that posts of the suite fall into several."""
    if ":" in engine:
        module, _, function = engine.partition(":")
        made: tuple[Transport, Arena] = getattr(import_module(module), function)(run_dir, epoch, pages, page_bytes)
        return made
    setup = registry.Setup(run_dir=run_dir, epoch=epoch, max_transfer_pages=100, direction="both")
    return registry.make(engine, setup), shared_arena(pages, page_bytes)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def size(pid: int, without: int = 0) -> dict[str, int]:
    """Memory in KiB, threads and open files of a process and its children, but for one that is a party of its own."""
    found = {"kib": 0, "threads": 0, "files": 0}
    for each in {pid, *children(pid)} - {without}:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
        found["kib"] += int(status["RssAnon"].split()[0])
        found["threads"] += int(status["Threads"])
        found["files"] += open_files(each)
    return found


def grant_of(plain: list[Any]) -> Grant:
    region, generation, pages = plain
    return Grant(region, generation, tuple(pages))


class Party:
    def __init__(self, transport: Transport, arena: Arena, epoch: int) -> None:
        self._transport, self._arena, self._epoch = transport, arena, epoch
        self._peers: dict[int, Peer] = {}
        self._posts: dict[int, Post] = {}
        self._ended: list[list[Any]] = []
        self._told: set[int] = set()
        self._lost: list[int] = []
        self._storm: Callable[[], Post] | None = None
        self._in_storm: set[int] = set()
        self._storm_ends = dict.fromkeys((outcome.name for outcome in Outcome), 0)
        transport.register(arena)

    def turn(self) -> None:
        self._take(self._transport.poll())
        self._lost += [lost.peer_epoch for lost in self._transport.events()]
        if self._storm is not None:
            for _ in range(STORM_DEPTH - len(self._in_storm)):
                self._in_storm.add(self._storm().id)

    def _take(self, ended: list[tuple[Post, Outcome]]) -> None:
        for post, outcome in ended:
            assert post.id not in self._told, f"the end of post {post.id} was told twice"
            self._told.add(post.id)
            self._posts.pop(post.id, None)
            if post.id in self._in_storm:
                self._in_storm.discard(post.id)
                self._storm_ends[outcome.name] += 1
            else:
                self._ended.append([post.id, outcome.name])

    def timeout_ms(self) -> int | None:
        return 1 if self._storm is not None else None

    # ------------------------------------------------------------ commands: as a lender

    def descriptor(self, peer_epoch: int) -> str:
        return self._transport.descriptor(peer_epoch).hex()

    def lend(self, peer_epoch: int, pages: list[int], access: Any = "write") -> int | None:
        return self._transport.lend(peer_epoch, pages, access=access)

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        self._transport.withdraw(peer_epoch, generation)

    def fence(self, peer_epoch: int, generation: int) -> bool:
        return self._transport.fence(peer_epoch, generation) is not None

    def fill(self, value: int) -> None:
        """Page i becomes all bytes (value + i) % 251."""
        for i in range(self._arena.count):
            self._arena.pages[i] = (value + i) % 251

    def generation(self, epoch: int) -> int | None:
        return self._transport.generation(epoch)

    # ------------------------------------------------------------ as a poster

    def connect(self, descriptor: str) -> int:
        peer = self._transport.connect(bytes.fromhex(descriptor), self._epoch)
        self._peers[peer.number] = peer
        return peer.number

    def disconnect(self, peer: int) -> None:
        self._transport.disconnect(self._peers.pop(peer))

    def write(self, peer: int, src: list[int], dst: list[int], grant: list[Any]) -> int:
        return self._keep(self._transport.write(self._peers[peer], src, dst, grant_of(grant)))

    def read(self, peer: int, dst: list[int], src: list[int], grant: list[Any]) -> int:
        return self._keep(self._transport.read(self._peers[peer], dst, src, grant_of(grant)))

    def _keep(self, post: Post) -> int:
        self._posts[post.id] = post
        return post.id

    def writes(self, peer: int, count: int, pages: list[int], grant: list[Any]) -> list[int]:
        return [self.write(peer, pages, pages, grant) for _ in range(count)]

    def burst(self, peer: int, work: list[list[Any]]) -> dict[str, int]:
        """Writes [pages, grant] each, WINDOW under way at a time, and all their outcomes."""
        ends: dict[str, int] = {}
        under_way: set[int] = set()
        waiting = list(reversed(work))
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        while waiting or under_way:
            while waiting and len(under_way) < WINDOW:
                pages, grant = waiting.pop()
                under_way.add(self._transport.write(self._peers[peer], pages, pages, grant_of(grant)).id)
            poller.poll(1000)
            for post, outcome in self._transport.poll():
                under_way.discard(post.id)
                ends[outcome.name] = ends.get(outcome.name, 0) + 1
            self._transport.events()
        return ends

    def cancel(self, post: int) -> bool:
        done = post in self._posts and self._transport.try_cancel(self._posts[post])
        if done:
            del self._posts[post]
        return done

    def drained(self, peer: int) -> bool:
        return self._transport.drain(self._peers[peer])

    def outcomes(self) -> list[list[Any]]:
        ended, self._ended = self._ended, []
        return ended

    def lost(self) -> list[int]:
        return self._lost

    def storm(self, peer: int, pages: list[int], grant: list[Any]) -> None:
        """Post `pages` over and over under this one grant, whatever happens to it."""
        granted = grant_of(grant)
        target = self._peers[peer]
        self._storm = lambda: self._transport.write(target, pages, pages, granted)

    def read_storm(self, peer: int, pages: list[int], grant: list[Any]) -> None:
        granted = grant_of(grant)
        target = self._peers[peer]
        self._storm = lambda: self._transport.read(target, pages, pages, granted)

    def calm(self) -> None:
        self._storm = None

    def storm_ends(self) -> dict[str, int]:
        return {**self._storm_ends, "open": len(self._in_storm)}

    def close(self) -> list[str]:
        """Close with whatever is open; the outcomes that are told one last time."""
        self._storm = None
        before = len(self._told)
        self._transport.close_all()
        open_posts = set(self._posts) | self._in_storm
        ended = self._transport.poll()
        self._take(ended)
        assert open_posts <= self._told, f"{len(open_posts - self._told)} posts were never told of"
        assert len(self._told) == before + len(ended)
        return [outcome.name for _, outcome in ended]

    # ------------------------------------------------------------ about the process

    def files(self) -> list[int]:
        return [open_files(pid) for pid in (os.getpid(), *children(os.getpid()))]

    def size(self) -> dict[str, int]:
        return size(os.getpid())

    def helpers(self) -> list[int]:
        return children(os.getpid())

    def threads(self) -> int:
        return threading.active_count()


def main(arguments: list[str]) -> None:
    """ENGINE RUN_DIR EPOCH PAGES PAGE_BYTES"""
    engine, run_dir, epoch, pages, page_bytes = arguments
    transport, arena = load(engine, Path(run_dir), int(epoch), int(pages), int(page_bytes))
    party = Party(transport, arena, int(epoch))
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    fileno = transport.fileno()
    poller.register(fileno, select.POLLIN)
    buffered = b""
    while True:
        ready = dict(poller.poll(party.timeout_ms()))
        if ready.get(fileno, 0) & (select.POLLNVAL | select.POLLERR):
            poller.unregister(fileno)  # it was closed on command
        party.turn()
        if sys.stdin.fileno() not in ready:
            continue
        data = os.read(sys.stdin.fileno(), 1 << 20)
        if not data:
            transport.close_all()
            leave(0)
            return
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            name, values = json.loads(line)
            answer = getattr(party, name)(*values)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
