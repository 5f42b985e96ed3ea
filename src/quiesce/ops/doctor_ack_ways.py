"""The scratch hand-off both ways: push, where prefill writes into decode's pages, and pull, where decode reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from quiesce.core.borrower import Borrower, Chunk, ChunkReady, LenderUp, Paired
from quiesce.core.lender import End, Lender, Publish
from quiesce.core.machine import Action, Opened
from quiesce.core.machine import Post as ToPost
from quiesce.core.messages import Accept, FirstToken, HandOff
from quiesce.core.pull_lender import PullLender
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import Ask, Computed, ReaderUp
from quiesce.ops.doctor_ack_sides import DECODE, PAGES, PAIRING, PREFILL, REMAINING_MS, TOKENS, WHY, Lending, Posting
from quiesce.transfer.interface import Peer, Post, Transport


class PushDecode(Lending):
    """Gives up once its offer was accepted: prefill has posted a write by then."""

    other = PREFILL

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.machine = Lender(DECODE, self.ledger)

    def begin(self) -> None:
        tid = self.machine.reserve({0: PREFILL}, room=1, pairing=PAIRING, tokens=TOKENS, pages=PAGES)
        generation = self.lend(self.ledger.pages(tid), "write")
        self.send(self.machine.on(Publish(tid, 0, 0, generation, REMAINING_MS)))

    def after(self, message: HandOff, actions: list[Action]) -> None:
        if isinstance(message, Accept):
            self.abort(self.machine.on(End(message.leg.tid, WHY)))


class PushPrefill(Posting):
    own, other = PREFILL, DECODE

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.machine = Borrower(PREFILL, self.ledger, batch=1, window=1)
        self.machine.on(LenderUp(DECODE))

    def consequences(self, actions: list[Action]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, Opened):
                pages = self.ledger.own(action.leg.tid, PAGES)
                assert pages is not None
                paired = self.machine.on(Paired(action.leg, PAIRING))
                # One page is not computed yet, so that DONE cannot be said.
                ready = self.machine.on(ChunkReady(action.leg, Chunk(pages[:-1], 0)))
                yield from self.consequences([*paired, *ready])
            else:
                yield from super().consequences([action])

    def post(self, peer: Peer, action: ToPost) -> Post:
        return self.transport.write(peer, action.source, action.destination, action.grant)


class PullPrefill(Lending):
    """Gives up right behind its offer: decode posts a read when it hears the one, before it hears the other."""

    other = DECODE

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.machine = PullLender(PREFILL, self.ledger)
        self.machine.on(ReaderUp(DECODE))

    def after(self, message: HandOff, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Opened):
                tid = action.leg.tid
                pages = self.ledger.own(tid, PAGES)
                assert pages is not None
                generation = self.lend(pages, "read")
                first = FirstToken(0)
                self.send(self.machine.on(Computed(tid, PAIRING, TOKENS, 0, generation, REMAINING_MS, first)))
                self.abort(self.machine.on(End(tid, WHY)))


class PullDecode(Posting):
    own, other = DECODE, PREFILL

    def __init__(self, transport: Transport, wire: socket.socket, seconds: float) -> None:
        super().__init__(transport, wire, seconds)
        self.machine = PullReader(DECODE, self.ledger, batch=1, window=1)

    def begin(self) -> None:
        tid = self.machine.reserve({0: PREFILL}, room=1, pairing=PAIRING, tokens=TOKENS, pages=PAGES)
        self.do(self.machine.on(Ask(tid, REMAINING_MS)))

    def post(self, peer: Peer, action: ToPost) -> Post:
        return self.transport.read(peer, action.destination, action.source, action.grant)
