"""Guards A: what a borrower may say about its own posts, and when."""

from __future__ import annotations

from core_rig import GENERATION, LATER_P, OTHER_D, P1, PAGES, BorrowerRig, D, LenderRig, P, messages, only, sent

from quiesce.core.borrower import Borrower, DrainSaid, Fault, LenderGone, LenderUp, Outcome, PostEnded
from quiesce.core.borrower import State as Borrowing
from quiesce.core.lender import State
from quiesce.core.machine import Closed, Heard, Opened, Post, Send, Timer, TryDrain
from quiesce.core.messages import Abort, Ack, Busy, Done, Drained, Failed, Leg, Offer, Refused, Tainted, TransferId

SPOKEN = (Drained, Tainted)


def test_a1_only_the_own_count_speaks():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=3)
    assert rig.record(leg).count == 3, "up before the post"
    rig.abort(leg)
    assert not messages(rig.ended(posts[0])) and not messages(rig.ended(posts[1]))
    assert messages(rig.ended(posts[2])) == [Drained(leg)]


def test_a1_the_count_falls_once_a_post():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=2)
    rig.abort(leg)
    for _ in range(3):
        assert not messages(rig.ended(posts[0]))
    assert rig.record(leg).count == 1 and rig.borrower.stale == 2
    assert messages(rig.ended(posts[1])) == [Drained(leg)]


def test_a1_the_taint_is_set_before_the_count_falls():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.abort(leg)
    assert messages(rig.ended(post, Outcome.UNKNOWN)) == [Tainted(leg)]


def test_a2_nothing_is_posted_after_the_stop_flag():
    rig = BorrowerRig(window=1)
    leg, (post,) = rig.posting()
    assert not rig.chunk(leg, 1), "waits for the window"
    rig.record(leg).stop = True
    assert not only(rig.ended(post), Post), "the flag is read before each single post"
    assert not only(rig.chunk(leg, 1), Post)
    assert rig.record(leg).count == 0


def test_a2_nothing_is_posted_once_an_abort_was_heard():
    rig = BorrowerRig(window=1)
    leg, (post,) = rig.posting()
    rig.chunk(leg, 1)
    actions = rig.abort(leg) + rig.chunk(leg, 2) + rig.ended(post) + rig.chunk(leg, 1) + rig.abort(leg)
    assert not only(actions, Post) and sent(actions, Drained)


def test_a2_done_is_not_said_of_a_transfer_that_was_stopped():
    rig = BorrowerRig(window=1)
    leg, (post,) = rig.posting()
    rig.chunk(leg, 1)
    rig.complete(leg)
    rig.record(leg).stop = True
    assert not sent(rig.ended(post), Done), "the queue was dropped, not posted"


def test_a3_whoever_brings_the_count_to_zero_answers():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.abort(leg)
    assert messages(rig.ended(post)) == [Drained(leg)]


def test_a3_registering_an_abort_tries_once_itself():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.ended(post)
    assert messages(rig.abort(leg)) == [Drained(leg)]
    failed = rig.opened(2)
    rig.borrower.on(Fault(failed, "boom"))
    assert messages(rig.abort(failed)) == [Drained(failed)]


def test_a4_forgetting_the_request_keeps_count_and_taint():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=2)
    rig.borrower.on(Fault(leg, "the scheduler cleared the sender"))
    rig.ledger.end(leg.tid)
    rig.hear(Ack(leg))
    rig.ended(posts[0], Outcome.UNKNOWN)
    assert messages(rig.abort(leg)) == [Busy(leg, 1)]
    assert messages(rig.ended(posts[1])) == [Tainted(leg)]


def test_a4_taint_of_a_cleared_request_has_a_home():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.borrower.on(Fault(leg, "cleared"))
    rig.hear(Ack(leg))
    rig.ended(post, Outcome.UNKNOWN)
    assert messages(rig.abort(leg)) == [Tainted(leg)]


def test_a4_an_ack_of_a_failure_clears_no_taint():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.ended(post, Outcome.UNKNOWN)
    rig.hear(Ack(leg))
    assert messages(rig.abort(leg)) == [Tainted(leg)]


def test_a5_unknown_to_a_new_epoch_is_no_answer():
    rig = BorrowerRig()
    predecessors = Leg(TransferId(D, 1), 0, 0, 0xBEEF)
    assert rig.abort(predecessors) == []
    assert rig.borrower.known == 0 and rig.borrower.stale == 1
    assert messages(rig.offer(predecessors)) == [Refused(predecessors, "wrong epoch")]


def test_a6_every_lender_rank_gets_its_own_answer():
    rig = BorrowerRig()
    first, (one,) = rig.posting(d_rank=0)
    second, (two,) = rig.posting(d_rank=1)
    rig.abort(first), rig.abort(second)
    assert messages(rig.ended(two)) == [Drained(second)]
    assert messages(rig.ended(one)) == [Drained(first)]


def test_a7_proofs_are_a_set_compared_with_what_was_offered():
    rig = LenderRig()
    tid = rig.holding({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    for _ in range(4):
        rig.hear(Drained(legs[0]))
        rig.hear(rig.done(legs[0]))
        assert rig.kept(tid), "one rank's proof, delivered twice, stood for two"
    assert only(rig.hear(Drained(legs[1])), Closed)


def test_a9_an_error_is_not_a_drain():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=2)
    rig.complete(leg)
    spoken = messages(rig.ended(posts[0], Outcome.UNKNOWN)) + messages(rig.ended(posts[1]))
    spoken += messages(rig.abort(leg)) + messages(rig.abort(leg))
    assert [type(message) for message in spoken] == [Failed, Tainted, Tainted]


def test_a10_all_siblings_of_a_failed_post_are_awaited():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=3)
    assert sent(rig.ended(posts[0], Outcome.FAILED_CLEAN), Failed)
    assert messages(rig.abort(leg)) == [Busy(leg, 2)]
    assert not messages(rig.ended(posts[2]))
    assert messages(rig.ended(posts[1], Outcome.FAILED_CLEAN)) == [Drained(leg)]


def test_a11_every_handle_counts_until_it_is_terminal_whatever_another_says():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=2)
    rig.ended(posts[1], Outcome.UNKNOWN)
    for _ in range(3):
        assert messages(rig.abort(leg)) == [Busy(leg, 1)], "one handle is still in progress"
    assert messages(rig.ended(posts[0])) == [Tainted(leg)]


def test_a12_an_exception_taints_one_transfer_and_the_worker_lives_on():
    rig = BorrowerRig()
    leg, (post,) = rig.posting(1)
    rig.ended(post, Outcome.UNKNOWN)  # what a raised call is reported as
    assert rig.record(leg).count == 0 and rig.record(leg).tainted
    assert rig.record(rig.finished(2)).state is Borrowing.DONE


def test_a13_the_borrower_drops_and_counts_what_is_of_another_identity():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    foreign = [
        Leg(leg.tid, 0, 0, P1),
        Leg(leg.tid, 0, 1, P),
        Leg(leg.tid, 3, 0, P),
        Leg(TransferId(OTHER_D, 1), 0, 0, P),
        Leg(TransferId(D, 9), 0, 0, P),
    ]
    for other in foreign:
        assert rig.borrower.on(PostEnded(other, post.number, Outcome.PLACED)) == []
        assert rig.chunk(other, 1) == []
    assert rig.record(leg).count == 1
    assert rig.borrower.stale == 2 * len(foreign)
    assert rig.hear(Abort(leg, "x"), speaker=OTHER_D) == [], "an ABORT in another lender's session"
    assert rig.record(leg).state is Borrowing.OPEN


def test_a13_a_stale_outcome_is_not_that_of_the_next_post():
    rig = BorrowerRig(window=1)
    leg, (first,) = rig.posting()
    rig.chunk(leg, 1)
    (second,) = only(rig.ended(first), Post)
    rig.abort(leg)
    assert rig.ended(first) == []
    assert messages(rig.ended(second)) == [Drained(leg)]


def test_a13_every_post_carries_the_grant_of_its_own_offer():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    assert (post.leg, post.grant.generation, post.destination) == (leg, GENERATION, (100,))


def test_a13_the_lender_drops_and_counts_what_is_of_another_identity():
    rig = LenderRig()
    tid = rig.offered()
    leg = rig.leg(tid)
    wrong = [Leg(tid, 0, 0, LATER_P), Leg(tid, 1, 0, P), Leg(tid, 0, 1, P), Leg(TransferId(OTHER_D, 1), 0, 0, P)]
    for other in wrong:
        rig.hear(rig.done(other))
        rig.hear(Failed(other, "not ours"))
    rig.hear(rig.done(leg), speaker=P1)
    assert rig.state(tid) is State.OFFERED and rig.kept(tid)
    assert rig.lender.stale == 2 * len(wrong) + 1


def test_a14_an_old_lenders_words_are_void_and_it_does_not_come_back():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    rig.ended(post, Outcome.UNKNOWN)
    rig.borrower.on(LenderGone(D))
    rig.borrower.on(LenderUp(OTHER_D))
    for again in (False, True):
        if again:
            rig.borrower.on(LenderUp(D))
        assert rig.abort(leg) == [], "its taint was forgotten: NEVER_STARTED would be a lie"
        late = rig.offer(rig.leg(2))
        assert not only(late, Opened) and sent(late, Refused)
        rig.closed_set(high=9)
    assert only(rig.offer(rig.leg(1, epoch=OTHER_D)), Opened)


def test_a14_a_transfer_is_never_re_addressed_to_a_new_epoch():
    rig = LenderRig()
    tid = rig.offered()
    rig.hear(Refused(rig.leg(tid), "wrong epoch"), speaker=LATER_P)
    assert rig.state(tid) is State.HOLDING and rig.kept(tid), "it proves nothing"
    for _ in range(3):
        assert {send.to for send in only(rig.fire(Timer.REPEAT, tid), Send)} == {P}


def test_a14_an_offer_goes_to_the_epoch_it_was_reserved_for_only():
    rig = LenderRig()
    tid = rig.offered()
    for _ in range(3):
        assert [(send.to, send.message.leg.p_epoch) for send in only(rig.fire(Timer.REPEAT, tid), Send)] == [(P, P)]
    half = rig.reserve({0: P, 1: P1})
    rig.publish(half)
    rig.hear(rig.done(rig.leg(half)))
    assert rig.publish(half) == [], "published once, to one epoch"
    assert not rig.ledger.leases(half), "a proven lease was opened again"


def test_a15_a_taint_ends_by_a_drain_proof_or_the_closed_set_and_by_nothing_else():
    rig = BorrowerRig()
    for seq in (1, 2):
        leg, (post,) = rig.posting(seq)
        rig.abort(leg)
        assert TryDrain(leg) in rig.ended(post, Outcome.UNKNOWN)
    proven, covered = rig.leg(1), rig.leg(2)
    assert rig.borrower.on(DrainSaid(proven, False)) == []
    rig.hear(Ack(proven)), rig.fire(proven), rig.abort(proven)
    assert rig.record(proven).state is Borrowing.TAINTED
    assert messages(rig.borrower.on(DrainSaid(proven, True))) == [Drained(proven)]
    rig.closed_set(high=2, open_seqs=[1])
    assert rig.borrower.record(covered) is None
    assert rig.ledger.census().free == 12


def test_a15_one_taint_does_not_make_other_requests_wait():
    rig = BorrowerRig()
    leg, (post,) = rig.posting(1)
    rig.ended(post, Outcome.UNKNOWN)
    assert rig.record(rig.finished(2)).state is Borrowing.DONE
    assert rig.record(leg).tainted


def test_two_epochs_of_one_borrower_share_nothing():
    """Story 1: a queued OFFER of a finished transfer reaches the borrower's successor."""
    lender, rig = LenderRig(), BorrowerRig()
    tid = lender.offered()
    (offer,) = sent(lender.fire(Timer.REPEAT, tid), Offer)
    successor = Borrower(LATER_P, rig.ledger)
    successor.on(LenderUp(D))
    actions = successor.on(Heard(offer, D))
    assert messages(actions) == [Refused(offer.leg, "wrong epoch")] and not only(actions, Opened)
    assert len(offer.grant.pages) == PAGES
