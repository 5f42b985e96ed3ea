"""Guards N: the other side is told, told again, and nothing is forgotten before it is allowed."""

from __future__ import annotations

import pytest
from core_rig import P1, PAGES, BorrowerRig, LenderRig, P, messages, only, sent

from quiesce.core.borrower import Complete, Fault, LenderGone, Outcome
from quiesce.core.borrower import State as Borrowing
from quiesce.core.lender import State
from quiesce.core.machine import Arm, Closed, Lost, Opened, Post, Send, Stopped, Timer, TryDrain
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    FirstToken,
    Leg,
    NeverStarted,
    Offer,
    Refused,
    Tainted,
)


def test_n1_abort_goes_to_every_published_rank_the_failed_one_and_dummies_included():
    rig = LenderRig()
    tid = rig.reserve({0: P, 1: P1, 2: 0xA2})
    rig.publish(tid, 0)
    rig.publish(tid, 1)  # a dummy: it accepts and carries nothing
    rig.hear(Accept(rig.leg(tid, 1), 0))
    aborts = [
        action for action in only(rig.hear(Failed(rig.leg(tid), "boom")), Send) if type(action.message) is Abort
    ]
    assert [(abort.to, abort.message.leg.p_rank) for abort in aborts] == [(P, 0), (P1, 1)]


def test_n2_an_answer_to_the_first_abort_is_never_too_early():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    answers = [rig.hear(Drained(abort.leg)) for abort in sent(rig.end(tid), Abort)]
    assert only(answers[-1], Closed) and rig.all_free()


def test_n3_abort_is_repeated_with_back_off_until_proven():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    attempts = [arm.attempt for arm in only(rig.end(tid), Arm) if arm.timer is Timer.REPEAT]
    for _ in range(5):
        actions = rig.fire(Timer.REPEAT, tid)
        assert [abort.leg.p_rank for abort in sent(actions, Abort)] == [0, 1]
        attempts += [arm.attempt for arm in only(actions, Arm)]
    assert attempts == sorted(set(attempts)) and len(attempts) == 6
    rig.hear(Tainted(rig.leg(tid, 0)))
    assert len(sent(rig.fire(Timer.REPEAT, tid), Abort)) == 2, "TAINTED is not final"
    rig.hear(Drained(rig.leg(tid, 0)))
    assert [abort.leg.p_rank for abort in sent(rig.fire(Timer.REPEAT, tid), Abort)] == [1]


def test_n3_offer_is_repeated_until_it_is_answered():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    for _ in range(3):
        actions = rig.fire(Timer.REPEAT, tid)
        assert [offer.leg.p_rank for offer in sent(actions, Offer)] == [0, 1]
        assert only(actions, Arm)
    rig.hear(Accept(rig.leg(tid, 0), 0))
    rig.hear(rig.done(rig.leg(tid, 1)))
    assert rig.fire(Timer.REPEAT, tid) == []


def test_n3_every_repeated_abort_is_answered():
    rig = BorrowerRig()
    never = rig.leg(1)
    done = rig.finished(2)
    drained, (clean,) = rig.posting(3)
    tainted, (lost,) = rig.posting(4)
    rig.abort(drained), rig.abort(tainted)
    for _ in range(2):
        assert messages(rig.abort(drained)) == [Busy(drained, 1)]
    rig.ended(clean), rig.ended(lost, Outcome.UNKNOWN)
    rig.abort(never)
    for _ in range(2):
        assert messages(rig.abort(never)) == [Drained(never)]
        assert messages(rig.abort(done)) == [Drained(done)]
        assert messages(rig.abort(drained)) == [Drained(drained)]
        assert rig.abort(tainted) == [Send(tainted.tid.epoch, Tainted(tainted)), TryDrain(tainted)]


@pytest.mark.parametrize("good", [True, False])
def test_n3_done_and_failed_are_repeated_until_their_ack(good: bool):
    rig = BorrowerRig()
    if good:
        leg = rig.finished()
    else:
        leg = rig.opened()
        rig.borrower.on(Fault(leg, "compute failed"))
    for _ in range(3):
        actions = rig.fire(leg)
        assert len(sent(actions, Done if good else Failed)) == 1 and only(actions, Arm)
    rig.hear(Ack(leg))
    assert rig.fire(leg) == []


def test_n4_a_repeated_abort_resets_nothing_that_was_proven():
    rig = LenderRig()
    tid = rig.holding({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    rig.hear(Drained(legs[0]))
    for _ in range(3):
        rig.fire(Timer.REPEAT, tid)
        rig.end(tid)
    assert only(rig.hear(Drained(legs[1])), Closed) and rig.all_free()


def never_started(rig: BorrowerRig) -> Leg:
    leg = rig.leg()
    rig.abort(leg)
    return leg


def drained(rig: BorrowerRig) -> Leg:
    leg, (post,) = rig.posting()
    rig.abort(leg)
    rig.ended(post)
    return leg


def done_and_acked(rig: BorrowerRig) -> Leg:
    leg = rig.finished()
    rig.hear(Ack(leg))
    return leg


def done_and_aborted(rig: BorrowerRig) -> Leg:
    leg = rig.finished()
    rig.abort(leg)
    return leg


@pytest.mark.parametrize("end", [never_started, drained, done_and_acked, done_and_aborted])
def test_n5_every_end_leaves_a_tombstone_until_the_closed_set_covers_it(end):
    rig = BorrowerRig(max_records=20)
    leg = end(rig)
    for seq in range(50, 90):  # neither age nor pressure makes it go
        rig.offer(rig.leg(seq))
        rig.abort(rig.leg(seq + 100))
    rig.closed_set(high=500, open_seqs=range(500))
    late = rig.offer(leg)
    assert messages(late) == [Refused(leg, "ended")] and not only(late, Opened)
    rig.closed_set(high=1)
    assert rig.borrower.record(leg) is None
    late = rig.offer(leg)
    assert messages(late) == [Refused(leg, "closed")] and not only(late, Opened)


def test_n5_a_full_borrower_refuses_the_new_and_evicts_nothing():
    rig = BorrowerRig(max_records=2)
    first, second, third = (rig.leg(seq) for seq in (1, 2, 3))
    rig.offer(first), rig.abort(second)
    assert messages(rig.offer(third)) == [Refused(third, "full")]
    assert messages(rig.offer(first)) == [Accept(first, 0)]
    assert messages(rig.offer(second)) == [Refused(second, "ended")]


def test_d7_tombstones_are_bounded_and_what_cannot_be_remembered_is_not_answered():
    rig = BorrowerRig(max_records=2)
    for seq in range(1, 50):
        assert len(messages(rig.abort(rig.leg(seq)))) == (seq <= 4)
    assert rig.borrower.known == 4
    rig.closed_set(high=3)
    assert messages(rig.abort(rig.leg(49))) == [NeverStarted(rig.leg(49))]


def test_n5_an_older_closed_set_is_ignored():
    rig = BorrowerRig()
    rig.closed_set(high=3, open_seqs=[2])
    rig.counter = 0
    rig.closed_set(high=3)
    assert only(rig.offer(rig.leg(2)), Opened)


def test_n5_the_lender_lists_an_id_until_its_leases_are_closed():
    rig = LenderRig()
    held, committed = rig.holding(), rig.offered()
    rig.hear(rig.done(rig.leg(committed)))
    counter, high, listed = rig.lender.closed_set()
    assert (high, listed) == (2, [held.seq])
    rig.hear(Drained(rig.leg(held)))
    assert rig.lender.closed_set() == (counter + 1, 2, [])


@pytest.mark.parametrize("cause", ["fault", "post"])
def test_n7_a_failure_reaches_every_lender_rank_with_its_first_cause(cause: str):
    rig = BorrowerRig()
    first, (post,) = rig.posting(d_rank=0)
    second = rig.opened(d_rank=1)
    if cause == "fault":
        actions = rig.borrower.on(Fault(first, "out of memory"))
        reason = "out of memory"
    else:
        actions = rig.ended(post, Outcome.FAILED_CLEAN)
        reason = "a write into the decode worker's pages failed; nothing more of it will land"
    assert sent(actions, Failed) == [Failed(first, reason), Failed(second, reason)]
    assert only(actions, Stopped) == [Stopped(first, reason), Stopped(second, reason)]
    assert rig.borrower.on(Fault(second, "a later cause")) == []
    assert sent(rig.fire(second), Failed) == [Failed(second, reason)]


def test_n7_the_first_cause_wins_at_the_lender():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    actions = rig.hear(Failed(rig.leg(tid, 1), "the first cause"))
    actions += rig.hear(Failed(rig.leg(tid, 0), "an echo")) + rig.end(tid) + rig.fire(Timer.DEADLINE, tid)
    assert only(actions, Lost) == [Lost(tid, "the first cause")]


def test_n8_a_borrower_that_cannot_answer_says_busy_with_its_count_and_then_tainted():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=3)
    assert messages(rig.abort(leg)) == [Busy(leg, 3)]
    assert not messages(rig.ended(posts[0]))
    assert messages(rig.abort(leg)) == [Busy(leg, 2)]
    assert not messages(rig.ended(posts[1], Outcome.UNKNOWN))
    assert messages(rig.ended(posts[2])) == [Tainted(leg)]
    assert messages(rig.abort(leg)) == [Tainted(leg)]


def test_n8_busy_changes_no_state_of_the_lender():
    rig = LenderRig()
    tid = rig.holding()
    assert rig.hear(Busy(rig.leg(tid), 3)) == []
    assert rig.state(tid) is State.HOLDING and rig.kept(tid)


def test_n9_the_closed_set_of_one_rank_says_nothing_about_another():
    rig = BorrowerRig()
    one, _ = rig.posting(d_rank=0)
    two, _ = rig.posting(d_rank=1)
    rig.closed_set(high=1, rank=0)
    assert rig.record(two).state is Borrowing.OPEN
    assert messages(rig.abort(two)) == [Busy(two, 1)], "d1 was answered DRAINED while a post to it is under way"
    assert rig.record(one).stop


def test_n9_a_record_stays_while_it_counts():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.closed_set(high=1)
    assert rig.record(leg).count == 1 and rig.ledger.census().free == 12 - PAGES
    rig.ended(post)
    assert rig.borrower.record(leg) is None and rig.borrower.known == 0
    assert rig.ledger.census().free == 12


def test_n9_taint_and_sources_go_when_the_closed_set_covers_them():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.abort(leg)
    rig.ended(post, Outcome.UNKNOWN)
    rig.closed_set(high=2, open_seqs=[1])
    assert rig.record(leg).tainted
    rig.closed_set(high=2)
    assert rig.borrower.known == 0 and rig.ledger.census().free == 12


def test_n9_what_a_dead_lender_was_owed_goes_with_it_and_unanswered():
    rig = BorrowerRig()
    counting, (post,) = rig.posting(1)
    tombstone = done_and_acked_as(rig, 2)
    actions = rig.borrower.on(LenderGone(counting.tid.epoch))
    assert only(actions, Stopped) and not messages(actions)
    assert rig.borrower.record(tombstone) is None
    assert rig.record(counting).count == 1
    assert not rig.ended(post) and rig.borrower.known == 0
    rig.abort(counting)
    assert rig.borrower.known == 0, "a tombstone for a dead lender would stay for ever"


def done_and_acked_as(rig: BorrowerRig, seq: int) -> Leg:
    leg = rig.opened(seq)
    made = [post for first in range(PAGES) for post in only(rig.chunk(leg, first), Post)]
    rig.borrower.on(Complete(leg, 1, FirstToken(1)))
    for post in made:
        rig.ended(post)
    rig.hear(Ack(leg))
    assert rig.record(leg).state is Borrowing.TOMBSTONE
    return leg


def test_story_8_a_lost_offer_is_closed_by_its_abort():
    lender, borrower = LenderRig(), BorrowerRig()
    tid = lender.offered()
    (abort,) = sent(lender.end(tid), Abort)
    (answer,) = messages(borrower.hear(abort))
    assert answer == NeverStarted(abort.leg)
    assert only(lender.hear(answer), Closed)
