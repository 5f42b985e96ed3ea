"""One side of the hand-off with the other side played by the test: what the guard tests are written with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from quiesce.core.borrower import Borrower, Chunk, ChunkReady, Complete, LenderUp, Outcome, Paired, PostEnded, Record
from quiesce.core.ledger import Ledger
from quiesce.core.lender import End, Lender, Publish
from quiesce.core.lender import State as Lending
from quiesce.core.machine import Action, Fired, Heard, Post, Send, Timer
from quiesce.core.messages import Abort, Done, FirstToken, Grant, HandOff, Leg, Offer, Ping, TransferId
from quiesce.core.pages import PagePool

D, OTHER_D = 0xD0, 0xD1  # epochs of lenders
P, P1, LATER_P = 0xA0, 0xA1, 0xA9  # epochs of borrowers
GENERATION = 7
TOKENS = 40
PAGES = 3

T = TypeVar("T")


def only(actions: Iterable[Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: Iterable[Action], kind: type[T]) -> list[T]:
    return [action.message for action in only(actions, Send) if isinstance(action.message, kind)]


def messages(actions: Iterable[Action]) -> list[HandOff]:
    return [action.message for action in only(actions, Send)]


class LenderRig:
    """A lender with 12 pages and 4 rows."""

    def __init__(self, **options: Any) -> None:
        self.ledger = Ledger(PagePool(12), PagePool(4, "rows"))
        self.lender = Lender(D, self.ledger, **options)

    def reserve(self, ranks: dict[int, int] | None = None, pages: int = PAGES) -> TransferId:
        tid = self.lender.reserve(ranks or {0: P}, room=1, pairing=b"p", tokens=TOKENS, pages=pages)
        assert tid is not None
        return tid

    def publish(self, tid: TransferId, rank: int = 0, generation: int = GENERATION) -> list[Action]:
        return self.lender.on(Publish(tid, rank, region=0, generation=generation, remaining_ms=1000))

    def offered(self, ranks: dict[int, int] | None = None) -> TransferId:
        ranks = ranks or {0: P}
        tid = self.reserve(ranks)
        for rank in ranks:
            self.publish(tid, rank)
        return tid

    def holding(self, ranks: dict[int, int] | None = None) -> TransferId:
        tid = self.offered(ranks)
        self.end(tid)
        assert self.state(tid) is Lending.HOLDING
        return tid

    def end(self, tid: TransferId, reason: str = "the client went away") -> list[Action]:
        return self.lender.on(End(tid, reason))

    def leg(self, tid: TransferId, rank: int = 0) -> Leg:
        return Leg(tid, 0, rank, self.lender.transfers[tid].ranks[rank])

    def hear(self, message: HandOff, speaker: int | None = None) -> list[Action]:
        return self.lender.on(Heard(message, message.leg.p_epoch if speaker is None else speaker))

    def fire(self, timer: Timer, tid: TransferId) -> list[Action]:
        return self.lender.on(Fired(timer, tid, 0))

    def state(self, tid: TransferId) -> Lending | None:
        transfer = self.lender.transfers.get(tid)
        return None if transfer is None else transfer.state

    def done(self, leg: Leg, **changes: Any) -> Done:
        result = FirstToken(11) if leg.p_rank == 0 else None
        return Done(**{"leg": leg, "pages": PAGES, "tokens": TOKENS, "result": result, **changes})

    def kept(self, tid: TransferId) -> bool:
        """Nothing of it can be handed to anybody else: neither its pages nor its row."""
        census = self.ledger.census()
        return self.ledger.knows(tid) and census.free <= 12 - PAGES and census.rows_free <= 3

    def all_free(self) -> bool:
        census = self.ledger.census()
        return census.free == census.total and census.rows_free == census.rows_total


class BorrowerRig:
    """A borrower that knows the lender D, with 12 source pages and 4 rows."""

    def __init__(self, **options: Any) -> None:
        self.ledger = Ledger(PagePool(12), PagePool(4, "rows"))
        self.borrower = Borrower(P, self.ledger, **options)
        self.borrower.on(LenderUp(D))
        self.counter = 0

    def leg(self, seq: int = 1, d_rank: int = 0, epoch: int = D) -> Leg:
        return Leg(TransferId(epoch, seq), d_rank, 0, P)

    def offer(self, leg: Leg) -> list[Action]:
        grant = Grant(0, GENERATION, tuple(range(100, 100 + PAGES)))
        return self.hear(Offer(leg, 1, b"p", grant, TOKENS, 0, 1000))

    def pair(self, leg: Leg, pairing: bytes = b"p") -> list[Action]:
        return self.borrower.on(Paired(leg, pairing))

    def opened(self, seq: int = 1, d_rank: int = 0) -> Leg:
        """An accepted offer, paired with its request, which owns its source pages."""
        leg = self.leg(seq, d_rank)
        self.offer(leg)
        self.pair(leg)
        if not self.ledger.knows(leg.tid):
            assert self.ledger.own(leg.tid, PAGES) is not None
        return leg

    def posting(self, seq: int = 1, posts: int = 1, d_rank: int = 0) -> tuple[Leg, list[Post]]:
        """An open transfer with `posts` posts of one page each, none of which has ended."""
        leg = self.opened(seq, d_rank)
        made = [post for first in range(posts) for post in only(self.chunk(leg, first), Post)]
        assert len(made) == posts
        return leg, made

    def finished(self, seq: int = 1) -> Leg:
        """All posted, all placed, DONE said."""
        leg, posts = self.posting(seq, PAGES)
        self.complete(leg)
        for post in posts:
            self.ended(post)
        return leg

    def chunk(self, leg: Leg, first: int, pages: int = 1) -> list[Action]:
        source = self.ledger.pages(leg.tid)[first : first + pages] if self.ledger.knows(leg.tid) else (0,) * pages
        return self.borrower.on(ChunkReady(leg, Chunk(source, first)))

    def complete(self, leg: Leg, tokens: int = TOKENS) -> list[Action]:
        return self.borrower.on(Complete(leg, tokens, FirstToken(11)))

    def ended(self, post: Post, outcome: Outcome = Outcome.PLACED) -> list[Action]:
        return self.borrower.on(PostEnded(post.leg, post.number, outcome))

    def abort(self, leg: Leg) -> list[Action]:
        return self.hear(Abort(leg, "given up"))

    def hear(self, message: HandOff, speaker: int | None = None) -> list[Action]:
        return self.borrower.on(Heard(message, message.leg.tid.epoch if speaker is None else speaker))

    def fire(self, leg: Leg) -> list[Action]:
        return self.borrower.on(Fired(Timer.REPEAT, leg, 0))

    def closed_set(self, high: int, open_seqs: Iterable[int] = (), rank: int = 0) -> list[Action]:
        self.counter += 1
        return self.borrower.on(Heard(Ping(D, rank, 0, self.counter, high, list(open_seqs)), D))

    def record(self, leg: Leg) -> Record:
        record = self.borrower.record(leg)
        assert record is not None
        return record
