"""Guards D: what is let in, under which id, and how often it may be let out."""

from __future__ import annotations

import pytest
from core_rig import P1, D, LenderRig, P, only, sent

from quiesce.core.admission import Promises, check, effective_limit, pages_for, refuse_pool
from quiesce.core.fingerprint import Limits
from quiesce.core.ledger import Ledger, LedgerError
from quiesce.core.lender import TABLE, End, NotRevoked, State
from quiesce.core.machine import Action, Arm, Closed, Revoke, Timer
from quiesce.core.messages import Abort, Accept, Drained, TransferId
from quiesce.core.pages import DoubleReturn, PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind


@pytest.mark.parametrize(
    ("prompt", "answer", "fits"),
    [(1, 1, True), (99, 1, True), (60, 40, True), (100, 1, False), (60, 41, False), (0, 5, False), (5, 0, False)],
)
def test_d1_one_length_rule_refuses_with_400_and_a_reason(prompt: int, answer: int, fits: bool):
    refusal = check(prompt, answer, limit=100)
    assert (refusal is None) is fits
    if refusal is not None:
        assert refusal.status == 400 and refusal.reason


def test_d1_what_passes_the_rule_fits_the_smaller_pool():
    limits = Limits(4096, 640, 8), Limits(4096, 1600, 8)
    limit = effective_limit(*limits)
    assert check(limit - 1, 1, limit) is None and check(limit, 1, limit) is not None
    assert pages_for(limit, 16) <= min(worker.pool_tokens for worker in limits) // 16


def test_d2_ending_is_idempotent():
    book = Ledger(PagePool(4), PagePool(2, "rows"))
    one, two = TransferId(D, 1), TransferId(D, 2)
    book.own(one, 2), book.own(two, 2)
    assert book.end(one) and not book.end(one)
    assert book.census().free == 2
    promises = Promises(10)
    promises.make(one, 4), promises.make(two, 4)
    promises.end(one), promises.end(one)
    assert promises.promised == 4 and promises.fits(6) and not promises.fits(6, held=1)


def test_d2_ending_waits_for_a_result_still_in_flight():
    book = Ledger(PagePool(4), PagePool(2, "rows"))
    tid = TransferId(D, 1)
    book.own(tid, 2)
    step = LeaseKey.compute(tid)
    book.lend(step)
    assert not book.end(tid) and book.census().free == 2
    with pytest.raises(LedgerError):
        book.lend(LeaseKey(tid, step.kind, 1, D))
    book.close(step, Proof.spoken(ProofKind.COMPLETED, step))
    assert book.census().free == 4


def test_d2_a_page_returned_by_hand_is_a_bug_that_shows():
    pool = PagePool(4)
    give_back = pool.claim_return()
    first, second = pool.take(2) or (), pool.take(2) or ()
    with pytest.raises(DoubleReturn):
        give_back(first[:1])
    with pytest.raises(DoubleReturn):
        give_back((*first,)[::-1])
    give_back(first)
    with pytest.raises(DoubleReturn, match="pages 0, 1 came back"):
        give_back(first)
    give_back(second)
    assert pool.free == 4 and not list(pool.out())
    with pytest.raises(AssertionError):
        pool.claim_return()


def test_d3_the_limit_is_the_smallest_of_context_and_both_pools():
    roomy = Limits(1_048_576, 2_000_000, 8)
    assert effective_limit(roomy, Limits(1_048_576, 681_280, 8)) == 681_280
    assert effective_limit(roomy, Limits(32_768, 681_280, 8)) == 32_768
    assert effective_limit(Limits(1_048_576, 500, 8), roomy) == 500


def test_d3_a_pool_smaller_than_the_context_is_refused_at_start_up():
    assert refuse_pool(681_280, 681_280, "decode") is None
    why = refuse_pool(1_048_576, 681_280, "decode")
    assert why is not None and "681280" in why and "1048576" in why


def clocks(rig: LenderRig, tid: TransferId, *actions: list[Action]) -> set[Timer]:
    """The timers about it that run and would be heard, after these actions."""
    state = rig.lender.transfers[tid].state
    armed = {arm.timer for each in actions for arm in only(each, Arm) if arm.about == tid}
    return {timer for timer in armed if (state, timer) in TABLE}


def test_d4_whatever_a_transfer_waits_for_a_clock_of_its_own_ends_it():
    """Every state in which somebody else is waited for. A committed transfer is our own engine's alone, and one in
    quarantine ends with a fence or a restart (guard H15)."""
    rig = LenderRig()
    tid = rig.reserve({0: P, 1: P1})
    so_far = rig.publish(tid)  # the other rank has no offer yet
    assert rig.state(tid) is State.RESERVED and Timer.DEADLINE in clocks(rig, tid, so_far)
    so_far += rig.publish(tid, rank=1)
    assert rig.state(tid) is State.OFFERED and Timer.DEADLINE in clocks(rig, tid, so_far)
    so_far += rig.hear(rig.done(rig.leg(tid, 1))) + rig.hear(rig.done(rig.leg(tid), digest=b"x"))
    assert rig.state(tid) is State.LANDED and Timer.DEADLINE in clocks(rig, tid, so_far), "the digest is compared"
    for had in (True, False):
        rig = LenderRig()
        tid = rig.offered()
        held = rig.end(tid)
        assert rig.state(tid) is State.HOLDING and {Timer.REPEAT, Timer.HOLD} <= clocks(rig, tid, held)
        (fence,) = only(rig.fire(Timer.HOLD, tid), Revoke)
        assert rig.kept(tid), "no clock frees anything"
        if not had:  # it is asked for again
            again = rig.lender.on(NotRevoked(fence.epoch, fence.generation, fence.pages))
            assert Timer.REFENCE in clocks(rig, tid, again) and only(rig.fire(Timer.REFENCE, tid), Revoke)
    assert {state for state, event in TABLE if isinstance(event, Timer)} == set(State) - {
        State.COMMITTED,
        State.QUARANTINE,
    }


def test_d4_a_place_in_the_peers_queue_and_a_silent_peer_are_different_clocks():
    rig = LenderRig()
    tid = rig.reserve()
    offered = rig.publish(tid)
    assert clocks(rig, tid, offered) == {Timer.REPEAT, Timer.DEADLINE}
    (deadline,) = (arm for arm in only(offered, Arm) if arm.timer is Timer.DEADLINE)
    assert deadline.delay_ms == 1000, "its own request's, whatever the hold timeout"
    waiting = rig.hear(Accept(rig.leg(tid), place=500))
    for _ in range(100):  # however long it takes: nobody is asked to prove that he lives, nothing is sent again
        waiting += rig.fire(Timer.REPEAT, tid) + rig.fire(Timer.HOLD, tid) + rig.fire(Timer.REFENCE, tid)
    assert waiting == [] and rig.state(tid) is State.OFFERED
    late = rig.fire(Timer.DEADLINE, tid)
    assert rig.state(tid) is State.HOLDING and sent(late, Abort)
    assert not only(late, Revoke), "a late request says nothing of its peer"
    assert clocks(rig, tid, late) >= {Timer.HOLD, Timer.REPEAT}, "from here on silence counts"
    answered = rig.hear(Drained(rig.leg(tid)))
    assert only(answered, Closed) == [Closed(tid)] and rig.fire(Timer.HOLD, tid) == []


def test_d5_ids_are_minted_here_and_never_reused():
    rig = LenderRig()
    seen = []
    for _ in range(6):
        tid = rig.reserve()
        seen.append(tid)
        rig.end(tid)
    assert rig.lender.reserve({0: 1}, room=1, pairing=b"", tokens=1, pages=99) is None, "does not fit"
    rig.holding()
    seen.append(rig.reserve())
    assert len(set(seen)) == len(seen) and seen == sorted(seen)
    assert {tid.epoch for tid in seen} == {D}
    with pytest.raises(LedgerError):
        rig.ledger.own(seen[-1], 1)


def test_d5_the_same_room_twice_is_two_transfers():
    rig = LenderRig()
    one, two = rig.offered(), rig.offered()
    assert rig.lender.transfers[one].room == rig.lender.transfers[two].room and one != two
    actions = rig.lender.on(End(one, "cancelled"))
    assert [abort.leg.tid for abort in sent(actions, Abort)] == [one]
    assert only(rig.hear(Drained(rig.leg(one))), Closed) == [Closed(one)]
    assert rig.kept(two)
