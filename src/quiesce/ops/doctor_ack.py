"""The way of the answer that frees pages: a scratch hand-off is given up half way, and DRAINED has to come back.

Two threads stand for a decode and a prefill worker: the machines, the messages and the transport are those that
serve; between them is a socket. The lender ends the request once its offer was accepted, with a write posted.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quiesce.core.borrower import Borrower, Chunk, ChunkReady, DrainSaid, LenderUp, Paired, PostEnded
from quiesce.core.ledger import Ledger
from quiesce.core.lender import End, Lender, NotRevoked, Publish
from quiesce.core.machine import Action, Closed, Heard, Opened, Revoke, Send, TryDrain
from quiesce.core.machine import Post as ToPost
from quiesce.core.messages import Accept, Busy, Codec, Drained, HandOff, Leg, NeverStarted, Tainted
from quiesce.core.pages import PagePool
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Peer, Post, Transport

DECODE, PREFILL = 0xD1, 0xD2  # epochs
PAGES, PAGE_BYTES, TOKENS = 4, 4096, 64
PAIRING = b"doctor"
SECONDS = 10.0
ANSWERS = (Busy, Drained, NeverStarted, Tainted)

Make = Callable[[int], Transport]


@dataclass(frozen=True)
class Told:
    """`closed_by`: the proof that closed the lease, empty: none did. `posts`: made by prefill.
    `milliseconds`: from ABORT to the pages' return. `trouble`: what went wrong besides."""

    closed_by: str
    posts: int
    milliseconds: float
    answers: tuple[str, ...]
    trouble: str = ""

    @property
    def drained(self) -> bool:
        return self.closed_by == "drained" and self.posts > 0 and not self.trouble


class _Side:
    """A socket to the other side, a transport, and a deadline."""

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


class _Decode(_Side):
    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.lender = Lender(DECODE, self.ledger)
        self.answers: list[str] = []
        self.aborted = 0.0

    def play(self) -> float:
        """Seconds from ABORT to the return of every page."""
        self.wire.send(self.transport.descriptor(PREFILL))
        tid = self.lender.reserve({0: PREFILL}, room=1, pairing=PAIRING, tokens=TOKENS, pages=PAGES)
        assert tid is not None
        while (generation := self.transport.lend(PREFILL, self.ledger.pages(tid))) is None:
            self.transport.poll()
            self.wait()
        self.send(self.lender.on(Publish(tid, 0, 0, generation, int(SECONDS * 1000))))
        while True:
            self.transport.poll()
            for message in self.wait():
                if self._take(self.lender.on(Heard(message, PREFILL)), message):
                    return time.monotonic() - self.aborted
                if isinstance(message, Accept) and not self.aborted:
                    self.aborted = time.monotonic()
                    self.send(self.lender.on(End(tid, "the doctor gives it up")))

    def _take(self, actions: list[Action], message: HandOff) -> bool:
        if isinstance(message, ANSWERS):
            self.answers.append(type(message).__name__.upper())
        self.send(actions)
        for action in actions:
            if isinstance(action, Revoke):  # a fence would close the lease as well, and hide that no answer did
                self.lender.on(NotRevoked(action.epoch, action.generation, action.pages))
        return any(isinstance(action, Closed) for action in actions)


class _Prefill(_Side):
    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.borrower = Borrower(PREFILL, self.ledger, batch=1, window=1)
        self.borrower.on(LenderUp(DECODE))
        self.source = tuple(range(PAGES - 1))  # a page is not computed yet, so that DONE cannot be said
        self.peer: Peer | None = None
        self.open: dict[int, tuple[Leg, int]] = {}
        self.posts = 0

    def play(self) -> None:
        """Until the other side hangs up."""
        self.peer = self.transport.connect(self.wire.recv(1 << 16), PREFILL)
        while True:
            for post, outcome in self.transport.poll():
                leg, number = self.open.pop(post.id)
                self._do(self.borrower.on(PostEnded(leg, number, outcome)))
            try:
                heard = self.wait()
            except ConnectionError:
                return
            for message in heard:
                self._do(self.borrower.on(Heard(message, DECODE)))

    def _do(self, actions: list[Action]) -> None:
        for action in self._with_consequences(actions):
            if isinstance(action, ToPost):
                made = self._made(action)
                self.open[made.id] = (action.leg, action.number)
                self.posts += 1
            else:
                self.send([action])

    def _with_consequences(self, actions: list[Action]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, Opened):
                self.ledger.own(action.leg.tid, PAGES)
                paired = self.borrower.on(Paired(action.leg, PAIRING))
                ready = self.borrower.on(ChunkReady(action.leg, Chunk(self.source, 0)))
                yield from self._with_consequences([*paired, *ready])
            elif isinstance(action, TryDrain):
                assert self.peer is not None
                proven = self.transport.drain(self.peer)
                yield from self._with_consequences(self.borrower.on(DrainSaid(action.leg, proven)))
            else:
                yield action

    def _made(self, action: ToPost) -> Post:
        assert self.peer is not None
        return self.transport.write(self.peer, action.source, action.destination, action.grant)


def abort(make: Make, seconds: float = SECONDS) -> Told:
    """`make(epoch)` gives a transport of its own. Raises what `make` raises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    decode = _Decode(make(DECODE), ours, seconds)
    prefill = _Prefill(make(PREFILL), theirs, 2 * seconds)  # the lender gives up first, and hangs up
    failed: list[BaseException] = []
    thread = threading.Thread(target=_played, args=(prefill, failed), name="doctor-prefill")
    thread.start()
    took, trouble = 0.0, ""
    try:
        took = decode.play()
    except TimeoutError:
        trouble = f"no proof within {seconds:g} s"
    except (OSError, ValueError) as error:
        trouble = str(error)
    finally:
        ours.close()
        thread.join(2 * seconds + 1)
        theirs.close()
        for side in (prefill, decode):
            side.close()
    if failed:
        trouble = f"{type(failed[0]).__name__}: {failed[0]}"
    if not trouble and (left := decode.ledger.not_idle()):
        trouble = f"not returned: {left[0]}"
    closed = [kind for kind, count in decode.ledger.closed_by.items() if count]
    return Told(closed[0] if closed else "", prefill.posts, took * 1000, tuple(decode.answers), trouble)


def _played(side: _Prefill, failed: list[BaseException]) -> None:
    try:
        side.play()
    except Exception as error:  # of a thread: told to whoever joins it
        failed.append(error)
    finally:
        side.wire.close()
