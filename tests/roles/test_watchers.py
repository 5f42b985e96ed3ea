"""Nobody who keeps books stands between a proof and the pages that it frees."""

from __future__ import annotations

from quiesce.core.ledger import Change, Ledger
from quiesce.core.messages import Leg, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.roles.ownership import OwnershipLog
from quiesce.roles.watchers import Watchers

TID = TransferId(7, 1)
KEY = LeaseKey.write(Leg(TID, 0, 0, 9))


class Books:
    def __init__(self) -> None:
        self.ledger = Ledger(PagePool(8), PagePool(2, "rows"))
        self.told: list[str] = []
        self.free_when_told: list[int] = []
        self.watchers = Watchers(self.ledger, OwnershipLog(lambda tid: None, pages=8), self.hear)
        self.ledger.observe = self.watchers.observe

    def hear(self, change: Change) -> None:
        self.told.append(change.event)
        self.free_when_told.append(self.ledger.pool.free)

    def lend(self) -> None:
        self.ledger.own(TID, 3)
        self.ledger.lend(KEY)

    def prove(self) -> None:
        assert self.ledger.close(KEY, Proof.spoken(ProofKind.DRAINED, KEY))


def test_pages_are_free_and_the_answer_is_out_before_anybody_hears_of_it() -> None:
    books = Books()
    books.lend()
    with books.watchers:
        books.ledger.end(TID)
        books.prove()
        assert books.ledger.pool.free == 8
        books.told.append("answer")
    assert books.told == ["owned", "lent", "ended", "answer", "closed", "returned"]
    assert books.free_when_told[-2:] == [8, 8]


def test_a_turn_inside_a_turn_tells_nothing_before_the_outer_one_is_over() -> None:
    books = Books()
    books.lend()
    books.ledger.end(TID)
    with books.watchers:
        with books.watchers:
            books.prove()
        assert books.told[-1] == "ended"
    assert books.told[-2:] == ["closed", "returned"]


def test_what_cannot_wait_is_told_at_once_and_behind_what_came_before_it() -> None:
    """Whoever hears that a request has ended looks at the leases that it has just then."""
    books = Books()
    books.lend()
    with books.watchers:
        books.prove()
        books.ledger.end(TID)
        assert books.told == ["owned", "lent", "closed", "ended"]
    assert books.told[-1] == "returned"


def test_outside_a_turn_everything_is_told_as_it_happens() -> None:
    books = Books()
    books.lend()
    books.prove()
    assert books.told[-1] == "closed"


def test_one_that_raises_is_counted_and_the_others_hear_of_it_all_the_same() -> None:
    books = Books()

    def broken(change: Change) -> None:
        if change.event == "returned":
            raise OSError("no space left on device")

    watchers = Watchers(books.ledger, OwnershipLog(lambda tid: None, pages=8), broken, books.hear)
    books.ledger.observe = watchers.observe
    books.lend()
    with watchers:
        books.prove()
        books.ledger.end(TID)
    assert books.told[-1] == "returned" and len(books.ledger.faults) == 1
