"""One process of the conformance suite: a transport at the far end of a pipe, driven by lines of JSON.

`python -m quiesce.transfer.conformance_party FACTORY RUN_DIR EPOCH PAGES PAGE_BYTES`
"""

from __future__ import annotations

import json
import os
import select
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Arena, Peer, Post, Transport

STORM_DEPTH = 4  # posts kept in flight


def load_factory(name: str) -> Any:
    """`module:function`; the function takes (run_dir, epoch, pages, page_bytes), gives (transport, arena)."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Party:
    def __init__(self, transport: Transport, arena: Arena, epoch: int) -> None:
        self._transport, self._arena, self._epoch = transport, arena, epoch
        self._peers: dict[int, Peer] = {}
        self._posts: dict[int, Post] = {}
        self._ended: list[list[Any]] = []
        self._lost: list[int] = []
        self._storm: tuple[Peer, list[int], Grant] | None = None
        self._in_storm: set[int] = set()
        self._storm_ends = dict.fromkeys((outcome.name for outcome in Outcome), 0)
        transport.register(arena)

    def turn(self) -> None:
        for post, outcome in self._transport.poll():
            self._posts.pop(post.id, None)
            if post.id in self._in_storm:
                self._in_storm.discard(post.id)
                self._storm_ends[outcome.name] += 1
            else:
                self._ended.append([post.id, outcome.name])
        self._lost += [lost.peer_epoch for lost in self._transport.events()]
        if self._storm is not None:
            peer, pages, grant = self._storm
            for _ in range(STORM_DEPTH - len(self._in_storm)):
                self._in_storm.add(self._transport.write(peer, pages, pages, grant).id)

    def timeout_ms(self) -> int | None:
        return 1 if self._storm is not None else None

    # ------------------------------------------------------------ commands

    def descriptor(self, peer_epoch: int) -> str:
        return self._transport.descriptor(peer_epoch).hex()

    def lend(self, peer_epoch: int, pages: list[int]) -> int | None:
        return self._transport.lend(peer_epoch, pages)

    def fill(self, value: int) -> None:
        """Page i becomes all bytes (value + i) % 251."""
        for i in range(self._arena.count):
            self._arena.pages[i] = (value + i) % 251

    def connect(self, descriptor: str) -> int:
        peer = self._transport.connect(bytes.fromhex(descriptor), self._epoch)
        self._peers[peer.number] = peer
        return peer.number

    def disconnect(self, peer: int) -> None:
        self._transport.disconnect(self._peers.pop(peer))

    def write(self, peer: int, src: list[int], dst: list[int], grant: list[Any]) -> int:
        region, generation, pages = grant
        post = self._transport.write(self._peers[peer], src, dst, Grant(region, generation, tuple(pages)))
        self._posts[post.id] = post
        return post.id

    def cancel(self, post: int) -> bool:
        return post in self._posts and self._transport.try_cancel(self._posts[post])

    def drained(self, peer: int) -> bool:
        return self._transport.drain(self._peers[peer])

    def outcomes(self) -> list[list[Any]]:
        ended, self._ended = self._ended, []
        return ended

    def lost(self) -> list[int]:
        return self._lost

    def storm(self, peer: int, pages: list[int], grant: list[Any]) -> None:
        """Post `pages` over and over under this one grant, whatever happens to it."""
        region, generation, granted = grant
        self._storm = (self._peers[peer], pages, Grant(region, generation, tuple(granted)))

    def calm(self) -> None:
        self._storm = None

    def storm_ends(self) -> dict[str, int]:
        return {**self._storm_ends, "open": len(self._in_storm)}

    def generation(self, epoch: int) -> int | None:
        return self._transport.generation(epoch)

    def files(self) -> list[int]:
        return [open_files(pid) for pid in (os.getpid(), *children(os.getpid()))]

    def helpers(self) -> list[int]:
        return children(os.getpid())


def main(arguments: list[str]) -> None:
    factory, run_dir, epoch, pages, page_bytes = arguments
    transport, arena = load_factory(factory)(Path(run_dir), int(epoch), int(pages), int(page_bytes))
    party = Party(transport, arena, int(epoch))
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    poller.register(transport.fileno(), select.POLLIN)
    buffered = b""
    while True:
        ready = dict(poller.poll(party.timeout_ms()))
        party.turn()
        if sys.stdin.fileno() not in ready:
            continue
        data = os.read(sys.stdin.fileno(), 1 << 20)
        if not data:
            transport.close_all()
            return
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            name, values = json.loads(line)
            answer = getattr(party, name)(*values)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
