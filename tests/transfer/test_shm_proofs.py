"""What the lender can prove about a mover, and what time and rumours cannot."""

from __future__ import annotations

import os
import signal
import time

import pytest

from quiesce.transfer.interface import FenceProof, Outcome

from .conftest import ALL, Pair


def test_h11_a_stopped_mover_is_proven_by_its_death_alone(pair: Pair) -> None:
    peer = pair.attach()
    generation = pair.grant().generation
    os.kill(pair.poster.mover_pid, signal.SIGSTOP)
    post = pair.poster.transport.write(peer, ALL, ALL, pair.grant())
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        for side in pair.sides:
            side.turn()
        assert pair.lender.transport.gone(pair.poster.epoch) is None
    assert post not in pair.poster.ended and not pair.poster.transport.drain(peer)
    proof = pair.until(lambda: pair.lender.transport.fence(pair.poster.epoch, generation), "the fence")
    assert proof == FenceProof("fenced", pair.poster.epoch, generation)
    assert pair.outcome(post) is Outcome.FAILED_CLEAN
    assert pair.poster.transport.drain(peer)


def test_h16_a_fence_counts_for_its_generation_only(pair: Pair) -> None:
    peer, old = pair.attach(), pair.grant()
    lender, epoch = pair.lender.transport, pair.poster.epoch
    pair.until(lambda: lender.fence(epoch, old.generation), "the fence")
    new = pair.until(lambda: lender.generation(epoch), "a new attachment")
    assert new > old.generation
    assert lender.fence(epoch, old.generation) == FenceProof("fenced", epoch, old.generation)
    assert lender.gone(epoch) == FenceProof("gone", epoch, old.generation)
    pair.lender.arena.pages[:] = 0
    refused = pair.poster.transport.write(peer, ALL, ALL, old)
    assert pair.outcome(refused) is Outcome.FAILED_CLEAN
    assert not pair.lender.arena.pages.any()
    assert lender.generation(epoch) == new, "the new attachment was left alone"


def test_h16_peers_are_fenced_one_by_one(pair: Pair) -> None:
    pair.attach()
    other = pair.side(0xBB)
    peer = other.transport.connect(pair.lender.transport.descriptor(), other.epoch)
    theirs = pair.until(lambda: pair.lender.transport.generation(other.epoch), "the second attachment")
    pair.until(lambda: pair.lender.transport.fence(pair.poster.epoch), "the fence")
    assert pair.lender.transport.gone(other.epoch) is None
    assert pair.lender.transport.generation(other.epoch) == theirs
    assert other.transport.drain(peer)


def test_h17_a_fence_of_what_was_never_granted_changes_nothing(pair: Pair) -> None:
    peer, grant = pair.attach(), pair.grant()
    lender = pair.lender.transport
    assert lender.fence(0xABCD) is None
    assert lender.fence(pair.poster.epoch, grant.generation + 1) is None
    assert lender.generation(pair.poster.epoch) == grant.generation
    post = pair.poster.transport.write(peer, [1], [2], grant)
    assert pair.outcome(post) is Outcome.PLACED


def test_h17_repeats_start_no_second_fence(pair: Pair) -> None:
    pair.attach()
    lender, epoch = pair.lender.transport, pair.poster.epoch
    first = lender.fence(epoch)
    assert lender.generation(epoch) is None, "no grants while a fence runs"
    new = pair.until(lambda: lender.generation(epoch), "a new attachment")
    proof = first or lender.fence(epoch)
    assert proof is not None and proof.generation < new, "the answer to the first asking"
    assert lender.generation(epoch) == new


def test_a_dead_mover_is_news_at_once_and_posts_end_clean(pair: Pair) -> None:
    peer, grant = pair.attach(), pair.grant()
    os.kill(pair.poster.mover_pid, signal.SIGSTOP)
    posts = [pair.poster.transport.write(peer, ALL, ALL, grant) for _ in range(20)]
    os.kill(pair.poster.mover_pid, signal.SIGKILL)
    lost = pair.until(lambda: pair.lender.lost, "news of the death")[-1]
    assert (lost.peer_epoch, lost.generation) == (pair.poster.epoch, grant.generation)
    assert pair.until(lambda: pair.lender.transport.gone(pair.poster.epoch), "proof of the death")
    assert pair.lender.lost[-1].reason == "mover died", "told when there is proof"
    pair.until(lambda: len(pair.poster.ended) == 20, "every outcome")
    assert [pair.poster.ended[post] for post in posts] == [Outcome.FAILED_CLEAN] * 20
    pair.until(lambda: pair.lender.transport.generation(pair.poster.epoch), "a new attachment")
    post = pair.poster.transport.write(peer, [4], [5], pair.grant())
    assert pair.outcome(post) is Outcome.PLACED
    assert (pair.lender.arena.pages[5] == 5).all()


def test_detaching_is_no_proof_of_death(pair: Pair) -> None:
    peer = pair.attach()
    pair.poster.transport.disconnect(peer)
    pair.until(lambda: pair.lender.lost, "news of the detachment")
    assert not pair.lender.lost[0].final
    assert pair.lender.transport.generation(pair.poster.epoch) is None
    assert pair.lender.transport.gone(pair.poster.epoch) is None
    assert pair.until(lambda: pair.lender.transport.fence(pair.poster.epoch), "the fence").kind == "fenced"


def test_a14_a_restarted_lender_is_out_of_reach_of_old_descriptors(pair: Pair) -> None:
    peer, grant = pair.attach(), pair.grant()
    old = pair.lender.transport.descriptor()
    pair.lender.transport.close_all()
    pair.sides.remove(pair.lender)
    again = pair.side(0xDD)
    assert again.transport.descriptor() != old
    pair.until(lambda: any(lost.final for lost in pair.poster.lost), "news of the lender's end")
    post = pair.poster.transport.write(peer, ALL, ALL, grant)
    assert pair.outcome(post) is Outcome.FAILED_CLEAN
    pair.poster.lost.clear()
    stale = pair.poster.transport.connect(old, pair.poster.epoch)
    pair.until(lambda: pair.poster.lost and pair.poster.lost[-1].final, "the stale descriptor to fail")
    assert again.transport.generation(pair.poster.epoch) is None
    assert not again.arena.pages.any()
    fresh = pair.attach(again)
    assert fresh.number not in (peer.number, stale.number)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_mover_outlives_a_signal_to_the_whole_group(pair: Pair, stop: signal.Signals) -> None:
    peer = pair.attach()
    os.kill(pair.poster.mover_pid, stop)
    post = pair.poster.transport.write(peer, [0], [0], pair.grant())
    assert pair.outcome(post) is Outcome.PLACED
