"""The two sides of the doctor's scratch hand-off: whose pages are lent, and who posts. Each runs in one thread."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quiesce.core.borrower import DrainSaid, PostEnded
from quiesce.core.codec import Codec
from quiesce.core.ledger import Ledger
from quiesce.core.lender import NotRevoked
from quiesce.core.machine import Action, Closed, Heard, Revoke, Send, TryDrain
from quiesce.core.machine import Post as ToPost
from quiesce.core.messages import Busy, Drained, HandOff, Leg, NeverStarted, Tainted
from quiesce.core.pages import PagePool
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Peer, Post, Transport

DECODE, PREFILL = 0xD1, 0xD2  # epochs
PAGES, PAGE_BYTES, TOKENS = 4, 4096, 64
PAIRING = b"doctor"
REMAINING_MS = 60_000
WHY = "the doctor gives it up"
ANSWERS = (Busy, Drained, NeverStarted, Tainted)


class Side:
    """A machine, a transport with scratch pages, a socket to the other side, a deadline."""

    machine: Any
    other: int  # the other side's epoch

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        self.transport, self.wire, self.codec = transport, wire, Codec()
        self.ledger = Ledger(PagePool(PAGES), PagePool(1, "rows"))
        self.arena = shared_arena(PAGES, PAGE_BYTES)
        transport.register(self.arena)
        self.deadline = time.monotonic() + seconds

    def close(self) -> None:
        self.transport.close_all()
        if self.arena.fd is not None:
            os.close(self.arena.fd)

    def wait(self) -> list[HandOff]:
        """What was said since; moves the transport on. Raises TimeoutError, ConnectionError."""
        if time.monotonic() > self.deadline:
            raise TimeoutError
        ready, _, _ = select.select([self.wire.fileno(), self.transport.fileno()], [], [], 0.02)
        self.transport.events()
        return [self._heard()] if self.wire.fileno() in ready else []

    def _heard(self) -> HandOff:
        frame = self.wire.recv(1 << 16)
        message = self.codec.decode(frame) if frame else None
        if message is None:
            raise ConnectionError("the other side has ended")
        return message  # type: ignore[return-value]

    def send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.wire.send(self.codec.encode(action.message))


class Lending(Side):
    """Lends its pages, gives up while they are posted to, and waits for the proof that returns them."""

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.answers: list[str] = []
        self.aborted = 0.0

    def play(self) -> float:
        """Seconds from ABORT to the return of every page."""
        self.wire.send(self.transport.descriptor(self.other))
        self.begin()
        while True:
            self.transport.poll()
            for message in self.wait():
                actions = self.machine.on(Heard(message, self.other))
                self.send(actions)
                if self._returned(actions, message):
                    return time.monotonic() - self.aborted
                self.after(message, actions)

    def begin(self) -> None:
        """What is said first, if this side says it."""

    def after(self, message: HandOff, actions: list[Action]) -> None:
        raise NotImplementedError

    def abort(self, actions: list[Action]) -> None:
        self.aborted = time.monotonic()
        self.send(actions)

    def lend(self, pages: tuple[int, ...], access: Any) -> int:
        """The generation, once the other side is attached."""
        while (generation := self.transport.lend(self.other, pages, access=access)) is None:
            self.transport.poll()
            self.wait()
        return generation

    def _returned(self, actions: list[Action], message: HandOff) -> bool:
        if isinstance(message, ANSWERS):
            self.answers.append(type(message).__name__.upper())
        for action in actions:
            if isinstance(action, Revoke):  # a fence would close the lease as well, and hide that no answer did
                self.machine.on(NotRevoked(action.epoch, action.generation, action.pages))
        return any(isinstance(action, Closed) for action in actions)


class Posting(Side):
    """Writes or reads the pages that are lent to it, until the other side hangs up."""

    own: int  # its epoch

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.open: dict[int, tuple[Leg, int]] = {}
        self.posts = 0

    def play(self) -> None:
        self.peer = self.transport.connect(self.wire.recv(1 << 16), self.own)
        self.begin()
        while True:
            for post, outcome in self.transport.poll():
                leg, number = self.open.pop(post.id)
                self.do(self.machine.on(PostEnded(leg, number, outcome)))
            try:
                heard = self.wait()
            except ConnectionError:
                return
            for message in heard:
                self.do(self.machine.on(Heard(message, self.other)))

    def begin(self) -> None:
        """What is said first, if this side says it."""

    def do(self, actions: list[Action]) -> None:
        for action in self.consequences(actions):
            if isinstance(action, ToPost):
                made = self.post(self.peer, action)
                self.open[made.id] = (action.leg, action.number)
                self.posts += 1
            else:
                self.send([action])

    def consequences(self, actions: list[Action]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, TryDrain):
                proven = self.transport.drain(self.peer)
                yield from self.consequences(self.machine.on(DrainSaid(action.leg, proven)))
            elif isinstance(action, Revoke):
                yield from self.consequences(
                    self.machine.on(NotRevoked(action.epoch, action.generation, action.pages))
                )
            else:
                yield action

    def post(self, peer: Peer, action: ToPost) -> Post:
        raise NotImplementedError
