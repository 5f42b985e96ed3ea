"""How a transfer is cut into posts, and fences that are as narrow as the pages in question."""

from __future__ import annotations

import pytest
from core_rig import GENERATION, BorrowerRig, LenderRig, P, only

from quiesce.core.borrower import Outcome
from quiesce.core.lender import NotRevoked, PeerLost, Revoked, State
from quiesce.core.machine import Arm, Post, Revoke, Timer
from quiesce.core.messages import Leg, Tainted
from quiesce.core.proofs import Proof


def test_l8_one_post_moves_at_most_so_many_pages_in_order() -> None:
    rig = BorrowerRig(batch=2, window=8)
    leg = rig.opened()
    posts = only(rig.chunk(leg, 0, pages=3), Post)
    own = rig.ledger.pages(leg.tid)
    assert [post.source for post in posts] == [own[:2], own[2:]]
    assert [post.destination for post in posts] == [(100, 101), (102,)]


@pytest.mark.parametrize("outcome", [Outcome.FAILED_CLEAN, Outcome.UNKNOWN])
def test_l8_the_first_failure_ends_the_posts_of_a_chunk(outcome: Outcome) -> None:
    rig = BorrowerRig(batch=1, window=1)
    leg = rig.opened()
    (first,) = only(rig.chunk(leg, 0, pages=3), Post)
    (second,) = only(rig.ended(first), Post)
    assert not only(rig.ended(second, outcome), Post), "the third page is never posted"


def tainted_pair() -> tuple[LenderRig, list[Leg], list[frozenset[int]]]:
    rig = LenderRig(page_fence=True)
    legs, pages = [], []
    for _ in range(2):
        tid = rig.holding()
        legs.append(rig.leg(tid))
        pages.append(frozenset(rig.ledger.pages(tid)))
    return rig, legs, pages


def test_h16_each_transfer_has_a_fence_of_its_own_pages() -> None:
    rig, legs, pages = tainted_pair()
    asked = [only(rig.hear(Tainted(leg)), Revoke) for leg in legs]
    assert asked == [[Revoke(P, GENERATION, False, these)] for these in pages], "one each"
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION, pages[0])))
    assert legs[0].tid not in rig.lender.transfers
    assert rig.lender.transfers[legs[1].tid].state is State.HOLDING, "other pages of the same peer"
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION, pages[1])))
    assert not rig.lender.transfers


def test_h16_a_wider_proof_answers_them_all() -> None:
    rig, legs, _ = tainted_pair()
    for leg in legs:
        rig.hear(Tainted(leg))
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
    assert not rig.lender.transfers and not rig.lender._fencing


def test_h16_a_fence_of_pages_leaves_a_transfer_under_way_alone() -> None:
    rig, legs, pages = tainted_pair()
    under_way = rig.offered()
    rig.hear(Tainted(legs[0]))
    rig.lender.on(Revoked(Proof.fenced(P, GENERATION, pages[0])))
    assert rig.lender.transfers[under_way].state is State.OFFERED


def test_h17_a_fence_that_is_not_to_be_had_is_asked_for_again_for_its_pages_only() -> None:
    rig, legs, pages = tainted_pair()
    for leg in legs:
        rig.hear(Tainted(leg))
    assert not only(rig.hear(Tainted(legs[0])), Revoke), "repeats start no second fence"
    again = only(rig.lender.on(NotRevoked(P, GENERATION, pages[0])), Arm)
    assert [(arm.timer, arm.about) for arm in again] == [(Timer.REFENCE, legs[0].tid)]
    assert only(rig.fire(Timer.REFENCE, legs[0].tid), Revoke) == [Revoke(P, GENERATION, False, pages[0])]
    assert not only(rig.fire(Timer.REFENCE, legs[1].tid), Revoke), "its own fence runs still"


def test_h16_who_is_lost_is_asked_for_as_dead_by_pages_too() -> None:
    rig, _, pages = tainted_pair()
    asked = only(rig.lender.on(PeerLost(P, "dead")), Revoke)
    assert asked == [Revoke(P, GENERATION, True, these) for these in pages]
    rig.lender.on(Revoked(Proof.gone(P, GENERATION)))
    assert not rig.lender.transfers and not rig.lender._fencing
