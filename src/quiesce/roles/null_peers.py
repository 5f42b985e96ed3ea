"""The other half of a health probe: a prefill or a decode side inside the worker itself, over the null transport.

A probe is a request like any other: the worker's own machine, ledger, pages and engine serve it, and the machine at
the other end is the real one too. Only the bytes do not move, and nobody else has to be there (guard N6).
Nothing is lost between the two, so their timers need no clock. Whatever comes to be said goes into `said`, in order.
"""

from __future__ import annotations

import secrets
from collections import deque

from quiesce.core.borrower import Borrower, Chunk, ChunkReady, Complete, DrainSaid, Paired, PostEnded
from quiesce.core.ledger import Ledger
from quiesce.core.lender import End, Lender, Publish
from quiesce.core.machine import Action, Committed, Heard, Lost, Opened, Post, Send, TryDrain
from quiesce.core.messages import FirstToken, HandOff, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Peer
from quiesce.transfer.null import NullTransport

PAGES = 64  # of the other half; a probe takes one
REMAINING_MS = 60_000


def _ledger() -> Ledger:
    return Ledger(PagePool(PAGES), PagePool(PAGES, "rows"))


class NullPrefill:
    """Answers a decode worker's offers at once."""

    def __init__(self, decode_epoch: int) -> None:
        self.epoch = secrets.randbits(64) | 1
        self.transport = NullTransport(self.epoch)
        generation = self.transport.generation(decode_epoch)
        assert generation is not None
        self.generation = generation
        self.said: deque[HandOff] = deque()
        self._decode = Peer(decode_epoch, 0)
        self._borrower = Borrower(self.epoch, _ledger())
        self._borrower._up(decode_epoch)

    def hear(self, message: HandOff | Ping) -> None:
        self._do(self._borrower.on(Heard(message, self._decode.epoch)))

    def _do(self, actions: list[Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Send(_, message):
                    self.said.append(message)
                case Opened(leg):
                    record = self._borrower.record(leg)
                    assert record is not None and record.offer is not None
                    offer = record.offer
                    pages = self._borrower.sources.own(leg.tid, len(offer.grant.pages))
                    assert pages is not None
                    todo.extend(self._borrower.on(Paired(leg, offer.pairing)))
                    todo.extend(self._borrower.on(ChunkReady(leg, Chunk(pages, 0))))
                    todo.extend(self._borrower.on(Complete(leg, offer.tokens, FirstToken(0))))
                case Post() as post:
                    outcome = _write(self.transport, self._decode, post)
                    todo.extend(self._borrower.on(PostEnded(post.leg, post.number, outcome)))
                case TryDrain(leg):
                    todo.extend(self._borrower.on(DrainSaid(leg, self.transport.drain(self._decode))))


class NullDecode:
    """Lends a prefill worker a page that is nowhere, and takes what comes of it."""

    def __init__(self, prefill_epoch: int) -> None:
        self.epoch = secrets.randbits(64) | 1
        self.said: deque[HandOff | Ping] = deque()
        self._prefill_epoch = prefill_epoch
        self._transport = NullTransport(prefill_epoch)
        self._peer = Peer(self.epoch, 0)
        self._lender = Lender(self.epoch, _ledger())

    def offer(self, room: int, pairing: bytes, tokens: int, pages: int) -> bool:
        """False: too many probes are under way."""
        tid = self._lender.reserve({0: self._prefill_epoch}, room=room, pairing=pairing, tokens=tokens, pages=pages)
        generation = self._transport.generation(self._prefill_epoch)
        assert generation is not None
        if tid is not None:
            self._do(self._lender.on(Publish(tid, 0, 0, generation, REMAINING_MS)))
        return tid is not None

    def hear(self, message: HandOff) -> None:
        self._do(self._lender.on(Heard(message, self._prefill_epoch)))

    def write(self, post: Post) -> Outcome:
        return _write(self._transport, self._peer, post)

    def _do(self, actions: list[Action]) -> None:
        todo = deque(actions)
        over: set[TransferId] = set()
        while todo:
            match todo.popleft():
                case Send(_, message):
                    self.said.append(message)
                case Committed(tid, _):
                    todo.extend(self._lender.on(End(tid, "the probe is over")))
                    over.add(tid)
                case Lost(tid, _):
                    over.add(tid)
        if over:  # nothing of it need be remembered by the other side
            counter, high, open_seqs = self._lender.closed_set()
            self.said.append(Ping(self.epoch, 0, 0, counter, high, open_seqs))


def _write(transport: NullTransport, peer: Peer, post: Post) -> Outcome:
    transport.write(peer, post.source, post.destination, post.grant)
    ((_, outcome),) = transport.poll()
    return outcome
