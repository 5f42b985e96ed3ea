"""Guards L: a hand-off commits only what was offered, whole, by everybody, and not while it is given up."""

from __future__ import annotations

import itertools
import random

import pytest
from core_rig import P1, PAGES, TOKENS, BorrowerRig, LenderRig, P, only, sent

from quiesce.core.borrower import Chunk, ChunkReady, Complete, Outcome
from quiesce.core.borrower import State as Borrowing
from quiesce.core.lender import State, Verified
from quiesce.core.machine import Closed, Committed, Lost, Opened, Post, Stopped, Timer, Verify
from quiesce.core.messages import Abort, Accept, Done, Failed, FirstToken
from quiesce.core.pairing import pairing_digest


def test_l1_only_a_chunk_whose_compute_has_finished_is_posted():
    rig = BorrowerRig()
    leg = rig.leg()
    actions = rig.offer(leg) + rig.offer(leg)
    assert only(actions, Opened) and rig.ledger.own(leg.tid, PAGES)
    actions += rig.pair(leg) + rig.complete(leg) + rig.fire(leg)
    assert not only(actions, Post)
    leg = rig.opened(2)
    source = rig.ledger.pages(leg.tid)
    posts = only(rig.borrower.on(ChunkReady(leg, Chunk(source[:2], 0))), Post)
    assert [(post.source, post.destination) for post in posts] == [(source[:2], (100, 101))]


def test_l2_commit_needs_done_of_every_rank_that_was_offered():
    rig = LenderRig()
    tid = rig.reserve({0: P, 1: P1})
    rig.publish(tid, 0)
    actions = rig.hear(rig.done(rig.leg(tid, 0)))
    assert rig.state(tid) is State.RESERVED
    actions += rig.publish(tid, 1) + rig.hear(rig.done(rig.leg(tid, 0))) + rig.hear(Accept(rig.leg(tid, 1), 0))
    assert rig.state(tid) is State.OFFERED and not only(actions, Committed)
    assert only(rig.hear(rig.done(rig.leg(tid, 1))), Committed) == [Committed(tid, FirstToken(11))]


def test_l2_a_digest_is_verified_before_the_commit():
    rig = LenderRig()
    tid = rig.offered()
    actions = rig.hear(rig.done(rig.leg(tid), digest=b"d"))
    assert only(actions, Verify) == [Verify(tid, b"d")] and not only(actions, Committed)
    assert only(rig.lender.on(Verified(tid, True)), Committed)


def test_l3_done_is_not_said_while_anything_is_queued_or_posted():
    rig = BorrowerRig(window=1)
    leg, (first,) = rig.posting()
    rig.chunk(leg, 1), rig.chunk(leg, 2)
    assert not sent(rig.complete(leg), Done)
    (second,) = only(rig.ended(first), Post)
    actions = rig.ended(second)
    (third,) = only(actions, Post)
    assert not sent(actions, Done)
    (done,) = sent(rig.ended(third), Done)
    assert (done.pages, done.tokens, done.result) == (PAGES, TOKENS, FirstToken(11))


def test_l3_done_is_not_said_before_the_last_chunk_was_handed_in():
    rig = BorrowerRig()
    leg, (post,) = rig.posting()
    assert not sent(rig.ended(post), Done), "more of the prompt is being computed"
    assert rig.record(leg).state is Borrowing.OPEN


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1])))
def test_l4_done_crossing_abort_is_a_proof_and_no_commit(order):
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    rig.end(tid)
    actions = [action for rank in order for action in rig.hear(rig.done(legs[rank]))]
    assert only(actions, Closed) and not only(actions, Committed) and rig.all_free()


def test_l4_a_known_failure_wins_over_a_later_success():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    rig.hear(rig.done(legs[0]))
    assert only(rig.hear(Failed(legs[1], "boom")), Lost)
    assert not only(rig.hear(rig.done(legs[1])), Committed)


@pytest.mark.parametrize("cause", ["ended", "deadline"])
def test_l4_what_was_given_up_during_verification_does_not_commit(cause: str):
    rig = LenderRig()
    tid = rig.offered()
    rig.hear(rig.done(rig.leg(tid), digest=b"d"))
    assert only(rig.end(tid) if cause == "ended" else rig.fire(Timer.DEADLINE, tid), Lost)
    assert not only(rig.lender.on(Verified(tid, True)), Committed) and rig.all_free()


@pytest.mark.parametrize(
    ("chunks", "why"),
    [([(0, 1), (2, 1)], "gap"), ([(0, 2), (1, 1)], "overlap"), ([(0, 2), (2, 2)], "granted"), ([(1, 1)], "gap")],
)
def test_l5_the_borrower_posts_no_gap_no_overlap_and_nothing_outside(chunks, why: str):
    rig = BorrowerRig(window=1)
    leg = rig.opened()
    ready = [ChunkReady(leg, Chunk(tuple(range(pages)), first)) for first, pages in chunks]
    actions = [action for event in ready for action in rig.borrower.on(event)]
    (failed,) = sent(actions, Failed)
    assert why in failed.reason
    touched = [page for post in only(actions, Post) for page in post.destination]
    assert len(touched) == len(set(touched)) and set(touched) <= {100, 101, 102}


def test_l5_what_was_filled_is_compared_with_what_was_offered():
    for wrong in ({"pages": PAGES - 1}, {"pages": PAGES + 1}, {"tokens": TOKENS - 1}, {"tokens": TOKENS + 1}):
        rig = LenderRig()
        tid = rig.offered({0: P, 1: P1})
        legs = rig.leg(tid, 0), rig.leg(tid, 1)
        actions = rig.hear(rig.done(legs[0])) + rig.hear(rig.done(legs[1], **wrong))
        assert only(actions, Lost) and not only(actions, Committed)


def test_l6_exactly_one_rank_speaks_for_the_result():
    rig = LenderRig()
    tid = rig.offered({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    actions = rig.hear(rig.done(legs[1], result=FirstToken(99))) + rig.hear(rig.done(legs[0], result=FirstToken(11)))
    assert only(actions, Committed) == [Committed(tid, FirstToken(11))]
    tid = rig.offered({0: P, 1: P1})
    legs = rig.leg(tid, 0), rig.leg(tid, 1)
    actions = rig.hear(rig.done(legs[1], result=FirstToken(99))) + rig.hear(rig.done(legs[0], result=None))
    assert not only(actions, Committed) and only(actions, Lost)


def test_scenario_a67_of_two_writers_of_one_result_the_designated_one_is_heard_in_any_order():
    """Rank 0 has the token, rank 1 says another one, or none; repeated and in any order, on recycled pages."""
    rig = LenderRig()
    draw = random.Random(67)
    for number in range(10_000):
        tid = rig.offered({0: P, 1: P1})
        right, other = rig.leg(tid, 0), rig.leg(tid, 1)
        said = [rig.done(right, result=FirstToken(number + 1))] * draw.randint(1, 2)
        said += [rig.done(other, result=draw.choice([None, FirstToken(0)]))] * draw.randint(1, 2)
        draw.shuffle(said)
        actions = [action for message in said for action in rig.hear(message)]
        assert only(actions, Committed) == [Committed(tid, FirstToken(number + 1))]
        rig.end(tid)
        assert rig.all_free()


def test_l9_the_pairing_digest_tells_tokens_model_adapter_and_tenant_apart():
    base = ((1, 2, 3), "m", "a", "s")
    variants = [
        base,
        ((1, 2), "m", "a", "s"),
        ((1, 2, 4), "m", "a", "s"),
        ((2, 1, 3), "m", "a", "s"),
        ((1, 2, 3, 0), "m", "a", "s"),
        ((1, 2, 3), "n", "a", "s"),
        ((1, 2, 3), "m", "b", "s"),
        ((1, 2, 3), "m", "a", "t"),
        ((1, 2, 3), "ma", "", "s"),
        ((1, 2, 3), "m", "as", ""),
        ((1, 2, 3), "", "ma", "s"),
        ((), "m", "a", "s"),
        ((0,), "m", "a", "s"),
        ((0, 0), "m", "a", "s"),
        ((256,), "m", "a", "s"),
        ((1,), "m", "a", "s"),
    ]
    digests = {pairing_digest(*variant) for variant in variants}
    assert len(digests) == len(variants) and {len(digest) for digest in digests} == {16}
    assert pairing_digest([1, 2, 3], "m", "a", "s") == pairing_digest(*base), "lists and tuples alike"


def test_l9_nothing_is_posted_for_an_offer_that_pairs_with_nothing():
    rig = BorrowerRig()
    leg = rig.leg()
    assert not only(rig.offer(leg), Post), "a room by itself opens no post"
    assert rig.ledger.own(leg.tid, PAGES)
    actions = rig.chunk(leg, 0)
    assert sent(actions, Failed) and only(actions, Stopped) and not only(actions, Post)
    leg = rig.leg(2)
    rig.offer(leg)
    actions = rig.complete(leg)
    assert sent(actions, Failed) and not sent(actions, Done)


@pytest.mark.parametrize("after", [b"p", b"q"])
def test_l9_an_offer_about_another_prompt_fails_and_posts_nothing(after: bytes):
    rig = BorrowerRig()
    leg = rig.leg()
    rig.offer(leg)
    assert rig.ledger.own(leg.tid, PAGES)
    actions = rig.pair(leg, b"q")
    (failed,) = sent(actions, Failed)
    assert failed.reason.startswith("pairing: ")
    assert only(actions, Stopped) == [Stopped(leg, failed.reason)]
    later = rig.pair(leg, after) + rig.chunk(leg, 0) + rig.complete(leg)
    assert not only(later, Post) and not sent(later, Done)
    assert rig.record(leg).state is Borrowing.FAILED
    assert rig.ledger.census().free == 12, "nothing of it was lent"


def test_l9_the_same_digest_lets_the_record_post():
    rig = BorrowerRig()
    leg = rig.leg()
    rig.offer(leg)
    assert rig.ledger.own(leg.tid, PAGES)
    assert rig.pair(leg) == []
    assert len(only(rig.chunk(leg, 0), Post)) == 1


@pytest.mark.parametrize("published", [1, 2])
@pytest.mark.parametrize("said", ["client gone", "cancelled", "the router saw prefill die"])
def test_r4_nothing_is_freed_on_the_routers_word(said: str, published: int):
    rig = LenderRig()
    tid = rig.reserve({0: P, 1: P1})
    for rank in range(published):
        rig.publish(tid, rank)
    actions = rig.end(tid, said) + rig.end(tid, said)
    assert rig.kept(tid) and not only(actions, Closed)
    assert len(sent(actions, Abort)) == published


def test_a_failed_clean_post_fails_the_transfer_and_is_never_done():
    rig = BorrowerRig()
    leg, posts = rig.posting(posts=PAGES)
    rig.borrower.on(Complete(leg, TOKENS, FirstToken(1)))
    actions = rig.ended(posts[0], Outcome.FAILED_CLEAN)
    for post in posts[1:]:
        actions += rig.ended(post)
    assert sent(actions, Failed) and not sent(actions, Done)
