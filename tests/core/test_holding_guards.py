"""Guards H: pages that were lent stay held until it is proven that nothing can touch them."""

from __future__ import annotations

import pytest
from core_rig import GENERATION, LATER_P, P1, PAGES, TOKENS, BorrowerRig, D, LenderRig, P, messages, only, sent

from quiesce.core.borrower import DrainSaid, LenderGone, Outcome
from quiesce.core.ledger import Ledger, LedgerError
from quiesce.core.lender import NotRevoked, PeerLost, Revoked, State, Verified
from quiesce.core.machine import Action, Arm, Closed, Committed, Lost, Revoke, Timer
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    Leg,
    NeverStarted,
    Refused,
    Tainted,
    TransferId,
)
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Borrowing, LeaseKey, Proof, ProofKind


def ledger() -> Ledger:
    return Ledger(PagePool(4), PagePool(2, "rows"))


TID = TransferId(D, 1)
WRITE = LeaseKey(TID, Borrowing.WRITE, 0, P)
READ = LeaseKey(TID, Borrowing.READ, 0, P)


def test_h1_a_page_with_an_open_lease_is_not_free():
    book = ledger()
    book.own(TID, 3)
    book.lend(WRITE)
    book.end(TID)
    assert book.pool.take(2) is None, "a page under an open write lease was handed out"
    assert book.close(WRITE, Proof.spoken(ProofKind.DRAINED, WRITE))
    assert book.pool.take(4) is not None


@pytest.mark.parametrize("kind", [Borrowing.READ, Borrowing.COMPUTE])
@pytest.mark.parametrize("writer_first", [True, False])
def test_h1_a_page_with_an_open_write_lease_has_no_reader(kind: Borrowing, writer_first: bool):
    book = ledger()
    pages = book.own(TID, 3)
    assert pages is not None
    keys = [WRITE, LeaseKey(TID, kind, 0, D)]
    first, second = keys if writer_first else keys[::-1]
    book.lend(first, pages=pages[:2])
    with pytest.raises(LedgerError):
        book.lend(second, pages=pages[1:])
    with pytest.raises(LedgerError):
        book.lend(second)
    book.lend(second, pages=pages[2:])  # other pages of the same transfer are nobody's business


def test_h2_pages_and_row_come_back_together():
    rig = LenderRig()
    tid = rig.holding()
    assert rig.ledger.census().rows_free == 3
    assert rig.ledger.census().free == 12 - PAGES
    rig.hear(Drained(rig.leg(tid)))
    assert rig.all_free()


def client_gone(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.end(tid, "the client went away")


def router_cancel(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.end(tid, "cancelled by the router")


def deadline(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.fire(Timer.DEADLINE, tid)


def prefill_failure(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.hear(Failed(rig.leg(tid), "out of memory"))


def refusal(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.hear(Refused(rig.leg(tid), "full"))


def refusal_by_a_tombstone(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.hear(Refused(rig.leg(tid), "ended"))


def refusal_by_a_successor(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.hear(Refused(rig.leg(tid), "wrong epoch"), speaker=LATER_P)


def peer_lost(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.lender.on(PeerLost(P, "prefill is gone"))


def access_revoked(rig: LenderRig, tid: TransferId) -> list[Action]:
    return rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))


ENDS = [
    client_gone,
    router_cancel,
    deadline,
    prefill_failure,
    refusal,
    refusal_by_a_tombstone,
    refusal_by_a_successor,
    peer_lost,
    access_revoked,
]


@pytest.mark.parametrize("end", ENDS)
def test_h3_every_end_goes_through_the_same_door(end):
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    actions = end(rig, tid)
    assert rig.state(tid) is State.HOLDING
    assert rig.kept(tid), "freed while rank 1 may still write"
    assert len(only(actions, Lost)) == 1
    assert rig.leg(tid, 1) in [abort.leg for abort in sent(actions, Abort)]


@pytest.mark.parametrize("wrong", [{"pages": PAGES - 1}, {"tokens": TOKENS + 1}, {"result": None}])
def test_h3_a_bad_landing_goes_through_the_same_door(wrong):
    rig = LenderRig()
    tid = rig.offered()
    actions = rig.hear(rig.done(rig.leg(tid), **wrong))
    assert len(only(actions, Lost)) == 1 and not only(actions, Committed)
    assert only(actions, Closed) and rig.all_free(), "DONE of every rank is a proof: nothing is left to wait for"


def test_h4_a_half_published_offer_counts_as_published():
    rig = LenderRig()
    tid = rig.reserve({0: P, 1: P1})
    rig.publish(tid, 0)  # whether the send that follows succeeded is not asked
    actions = rig.end(tid)
    assert rig.state(tid) is State.HOLDING and rig.kept(tid)
    assert [abort.leg for abort in sent(actions, Abort)] == [Leg(tid, 0, 0, P)]


def test_h5_nothing_published_nothing_held():
    rig = LenderRig()
    tid = rig.reserve()
    actions = rig.end(tid)
    assert only(actions, Closed) and rig.all_free()
    assert not messages(actions)


def answers(leg: Leg) -> list:
    return [
        Accept(leg, 0),
        Refused(leg, "ended"),
        Busy(leg, 1),
        Tainted(leg),
        Drained(leg),
        NeverStarted(leg),
        Failed(leg, "late"),
        Done(leg, PAGES, TOKENS),
    ]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("committed", [True, False])
def test_h7_late_messages_touch_nothing_at_the_lender(number: int, committed: bool):
    rig = LenderRig()
    tid = rig.offered()
    leg = rig.leg(tid)
    if committed:
        rig.hear(rig.done(leg))
        assert rig.state(tid) is State.COMMITTED
    else:
        rig.end(tid)
        rig.hear(Drained(leg))
        assert rig.state(tid) is None
    before = rig.ledger.census(), rig.state(tid)
    message = answers(leg)[number]
    actions = rig.hear(message)
    assert messages(actions) == ([Ack(leg)] if isinstance(message, Done | Failed) else [])
    assert len(actions) == len(messages(actions))
    assert (rig.ledger.census(), rig.state(tid)) == before


def test_h7_an_ack_is_also_given_for_ids_of_a_dead_lender():
    leg = Leg(TransferId(0xDEAD, 5), 0, 0, P)
    assert messages(LenderRig().hear(Done(leg, 1, 1))) == [Ack(leg)]


def test_h7_late_messages_create_nothing_at_the_borrower_but_a_tombstone():
    rig = BorrowerRig()
    leg = rig.leg()
    for message in [Ack(leg), *answers(leg)]:
        assert rig.hear(message) == []
    assert rig.borrower.known == 0
    assert messages(rig.abort(leg)) == [NeverStarted(leg)]
    assert rig.borrower.known == 1


def test_h9_a_release_that_fails_neither_stops_nor_repeats_the_others():
    heard = []

    def listener(tid: TransferId, pages: tuple[int, ...]) -> None:
        heard.append(tid.seq)
        if tid.seq == 1:
            raise RuntimeError("the page map is broken")

    book = Ledger(PagePool(4), PagePool(2, "rows"), listener)
    for seq in (1, 2):
        book.own(TransferId(D, seq), 2)
    for seq in (1, 2, 1):
        book.end(TransferId(D, seq))
    assert heard == [1, 2] and not book.knows(TransferId(D, 1))
    assert book.census().free == 4 and book.census().rows_free == 2
    assert [str(fault) for fault in book.faults] == ["the page map is broken"]


def test_h10_a_ledger_with_holds_is_not_idle():
    rig = LenderRig()
    tid = rig.holding()
    assert len(rig.ledger.not_idle()) == 1 and str(tid) in rig.ledger.not_idle()[0]
    rig.fire(Timer.HOLD, tid)
    assert "held" in rig.ledger.not_idle()[0], "a fence may still be had"
    rig.lender.on(NotRevoked(P, GENERATION))
    assert "retained" in rig.ledger.not_idle()[0]
    rig.hear(Drained(rig.leg(tid)))
    assert rig.ledger.not_idle() == []


def test_h11_time_starts_a_fence_and_frees_nothing():
    rig = LenderRig()
    tid = rig.holding()
    fences = []
    for _ in range(20):
        for timer in Timer:
            fences += only(rig.fire(timer, tid), Revoke)
            assert rig.kept(tid)
    assert fences == [Revoke(P, GENERATION, dead=False)]
    assert only(rig.lender.on(Revoked(Proof.fenced(P, GENERATION))), Closed) and rig.all_free()
    assert rig.ledger.closed_by == {"fenced": 1}


def test_h11_a_waiver_is_counted_as_unsound():
    rig = LenderRig(expiry="release")
    tid = rig.holding()
    assert only(rig.fire(Timer.HOLD, tid), Closed) and rig.all_free()
    assert rig.ledger.unsound == 1 and rig.ledger.closed_by == {"unsound": 1}


def test_h13_a_hold_is_resolved_by_the_clock_alone():
    rig = LenderRig()
    tid = rig.offered()
    assert Timer.HOLD in [arm.timer for arm in only(rig.end(tid), Arm)]
    assert only(rig.fire(Timer.HOLD, tid), Revoke)
    assert Timer.REFENCE in [arm.timer for arm in only(rig.lender.on(NotRevoked(P, GENERATION)), Arm)]
    assert only(rig.fire(Timer.REFENCE, tid), Revoke)
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert rig.all_free()


def test_h13_a_lost_peer_is_asked_for_gone_again_and_again():
    rig = LenderRig()
    tid = rig.offered()
    assert only(rig.lender.on(PeerLost(P, "dead")), Revoke) == [Revoke(P, GENERATION, dead=True)]
    for _ in range(3):
        rig.lender.on(NotRevoked(P, GENERATION))
        assert only(rig.fire(Timer.REFENCE, tid), Revoke) == [Revoke(P, GENERATION, dead=True)]


@pytest.mark.parametrize("outcome", [Outcome.PLACED, Outcome.FAILED_CLEAN])
def test_h14_source_pages_are_held_until_their_posts_have_ended(outcome: Outcome):
    rig = BorrowerRig()
    leg, (first, second) = rig.posting(posts=2)
    rig.abort(leg)
    rig.ledger.end(leg.tid)
    rig.ended(first, outcome)
    assert rig.ledger.census().free == 12 - PAGES, "a source page was freed under a pending post"
    rig.ended(second, outcome)
    assert rig.ledger.census().free == 12


@pytest.mark.parametrize("permit", ["closed set", "lender gone"])
def test_h14_source_pages_under_an_unknown_post_wait_for_the_lender(permit: str):
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.ended(post, Outcome.UNKNOWN)
    rig.abort(leg)
    rig.ledger.end(leg.tid)
    rig.closed_set(high=1, open_seqs=[1])
    assert rig.ledger.census().free == 12 - PAGES
    if permit == "closed set":
        rig.closed_set(high=1)
    else:
        rig.borrower.on(LenderGone(D))
    assert rig.ledger.census().free == 12


def test_h14_source_pages_in_doubt_are_reported_as_retained():
    """They may be held for as long as the lender has no proof either: an operator must see them, and a drained
    connection must still give them back."""
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.abort(leg)
    assert rig.ledger.census().held == PAGES, "the post may still end well"
    rig.ended(post, Outcome.UNKNOWN)
    census = rig.ledger.census()
    assert (census.held, census.retained) == (0, PAGES)
    rig.borrower.on(DrainSaid(leg, True))
    assert rig.ledger.census().free == 12


def quarantined(rig: LenderRig) -> TransferId:
    """A digest mismatch when P and P1 could have written; P1 had been granted generation 9."""
    other = rig.reserve({0: P1})
    rig.publish(other, generation=9)
    tid = rig.offered()
    rig.hear(rig.done(rig.leg(tid), digest=b"good"))
    assert only(rig.lender.on(Verified(tid, False, frozenset({P, P1}))), Lost)
    return tid


def test_h15_a_quarantine_ends_only_by_a_fence_of_every_peer():
    rig = LenderRig()
    tid = quarantined(rig)
    leg = rig.leg(tid)
    for message in (Drained(leg), rig.done(leg), NeverStarted(leg)):
        rig.hear(message)
    for timer in Timer:
        rig.fire(timer, tid)
    rig.end(tid)
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert rig.state(tid) is State.QUARANTINE and rig.kept(tid)
    assert not only(rig.lender.on(Revoked(Proof.fenced(P1, 8))), Closed), "P1 may still write under generation 9"
    assert not only(rig.lender.on(Revoked(Proof.fenced(P1, 9, frozenset({0})))), Closed), "only of one page"
    assert only(rig.lender.on(Revoked(Proof.fenced(P1, 9))), Closed)
    assert rig.all_free()


def test_h15_a_fence_that_ran_before_the_mismatch_was_found_says_nothing_about_it():
    rig = LenderRig()
    held = rig.holding()
    tid = rig.offered()
    rig.hear(rig.done(rig.leg(tid), digest=b"good"))
    assert only(rig.fire(Timer.HOLD, held), Revoke)
    rig.lender.on(Verified(tid, False, frozenset({P})))
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert rig.state(held) is None and rig.state(tid) is State.QUARANTINE
    assert only(rig.lender.on(Revoked(Proof.fenced(P, GENERATION + 1))), Closed)


def test_h15_a_quarantine_that_can_accuse_nobody_lasts_until_restart():
    rig = LenderRig()
    tid = rig.offered()
    rig.hear(rig.done(rig.leg(tid), digest=b"good"))
    rig.lender.on(Verified(tid, False))
    rig.lender.on(Revoked(Proof.fenced(P, 1 << 60)))
    assert rig.state(tid) is State.QUARANTINE and rig.kept(tid)


def test_h16_words_count_only_from_the_bound_epoch_about_its_own_lease():
    rig = LenderRig()
    other = rig.holding()
    tid = rig.holding({0: P, 1: P1})
    right, second = rig.leg(tid, 0), rig.leg(tid, 1)
    later = Leg(tid, 0, 0, LATER_P)
    for message, speaker in [
        (NeverStarted(later), LATER_P),  # the successor knows nothing
        (NeverStarted(right), LATER_P),
        (Drained(right), P1),
        (Drained(Leg(tid, 1, 0, P)), P),  # about another lender rank
        (Drained(second), P1),  # true, of rank 1 only
        (Drained(Leg(tid, 0, 1, P)), P),
    ]:
        rig.hear(message, speaker)
        assert rig.kept(tid) and rig.state(tid) is State.HOLDING
    rig.hear(Drained(right))
    assert rig.state(tid) is None and rig.state(other) is State.HOLDING


@pytest.mark.parametrize(
    "proof",
    [
        Proof.fenced(P, GENERATION - 1),
        Proof.fenced(P1, GENERATION),
        Proof.gone(LATER_P, GENERATION),
        Proof.gone(P, GENERATION - 1),
        Proof.fenced(P, GENERATION, frozenset()),
    ],
)
def test_h16_a_fence_counts_only_for_what_is_in_its_scope(proof: Proof):
    rig = LenderRig()
    tid = rig.holding()
    assert not only(rig.lender.on(Revoked(proof)), Closed)
    assert rig.kept(tid)


def test_h16_a_fence_of_some_pages_counts_for_those_only():
    rig = LenderRig()
    tid = rig.holding()
    pages = rig.ledger.pages(tid)
    actions = rig.lender.on(Revoked(Proof.fenced(P, GENERATION, frozenset(pages[:2]))))
    assert Timer.REFENCE in [arm.timer for arm in only(actions, Arm)], "the rest is still to be fenced"
    assert rig.kept(tid) and not rig.ledger.writers(pages[0]) and rig.ledger.writers(pages[2])
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION, frozenset(pages[2:]))))
    assert rig.all_free()


def test_h16_what_a_fence_revoked_never_commits():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    rig.lender.on(Revoked(Proof.fenced(P1, GENERATION)))
    actions = [action for leg in legs for action in rig.hear(rig.done(leg))]
    assert not only(actions, Committed) and rig.all_free()


def test_h17_a_fence_that_could_not_be_had_changes_nothing():
    rig = LenderRig()
    tid = rig.holding()
    rig.fire(Timer.HOLD, tid)
    actions = rig.lender.on(NotRevoked(P, GENERATION))
    assert rig.kept(tid) and rig.state(tid) is State.HOLDING
    assert {arm.timer for arm in only(actions, Arm)} == {Timer.REFENCE}
    assert sent(rig.fire(Timer.REPEAT, tid), Abort), "asking goes on"
    assert rig.state(rig.offered()) is State.OFFERED, "granting goes on"


def test_h17_repeats_start_no_second_fence_and_back_off_after_none():
    rig = LenderRig()
    tid = rig.holding()
    leg = rig.leg(tid)
    assert only(rig.hear(Tainted(leg)), Revoke) == [Revoke(P, GENERATION, dead=False)]
    assert not only(rig.hear(Tainted(leg)), Revoke), "one runs"
    first = only(rig.lender.on(NotRevoked(P, GENERATION)), Arm)[0]
    assert not only(rig.hear(Tainted(leg)), Revoke), "TAINTED again must wait for the timer"
    assert only(rig.fire(Timer.REFENCE, tid), Revoke), "it is asked for again"
    second = only(rig.lender.on(NotRevoked(P, GENERATION)), Arm)[0]
    assert second.attempt > first.attempt
    rig.fire(Timer.REFENCE, tid)
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert rig.all_free() and not only(rig.hear(Tainted(leg)), Revoke), "nothing is open any more"


def test_h17_one_fence_runs_for_all_transfers_of_a_peer():
    rig = LenderRig()
    one, two = rig.holding(), rig.holding()
    legs = rig.leg(one), rig.leg(two)
    fences = [*rig.hear(Tainted(legs[0])), *rig.hear(Tainted(legs[1])), *rig.fire(Timer.HOLD, two)]
    assert only(fences, Revoke) == [Revoke(P, GENERATION, dead=False)]
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert rig.all_free()


def test_h17_busy_defers_a_costly_fence_but_not_for_ever():
    rig = LenderRig(costly_fence=True)
    tid = rig.holding()
    deferred = 0
    while deferred < 20:
        rig.hear(Busy(rig.leg(tid), 1))
        if only(rig.fire(Timer.HOLD, tid), Revoke):
            break
        deferred += 1
    assert 0 < deferred < 20


def test_h16_a_fence_of_one_transfers_pages_leaves_the_peers_other_transfers_alone():
    rig = LenderRig(page_fence=True)
    good, bad = rig.offered(), rig.holding()
    (asked,) = only(rig.hear(Tainted(rig.leg(bad))), Revoke)
    assert asked.pages == frozenset(rig.ledger.pages(bad))
    actions = rig.lender.on(Revoked(Proof.fenced(P, GENERATION, asked.pages)))
    assert only(actions, Closed) == [Closed(bad)] and not only(actions, Lost) and not only(actions, Arm)
    rig.hear(rig.done(rig.leg(good)))
    assert rig.state(good) is State.COMMITTED
