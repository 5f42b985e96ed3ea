"""Holds as an observer of the ledger measures them: begun, ended, by which proof, and how late the answer was."""

from __future__ import annotations

import logging

import pytest

from quiesce.core.ledger import Ledger
from quiesce.core.messages import Abort, Busy, Drained, Leg, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind, Waiver
from quiesce.roles.meters import Holds

D, P = 0xD, 0xABC


class Rig:
    def __init__(self) -> None:
        self.ledger = Ledger(PagePool(8), PagePool(4, "rows"))
        self.now = 100.0
        self.holds = Holds(self.ledger, lambda: self.now)
        self.ledger.observe = self.holds.observe
        self.seq = 0

    def lent(self) -> Leg:
        self.seq += 1
        tid = TransferId(D, self.seq)
        leg = Leg(tid, 0, 0, P)
        self.ledger.own(tid, 2)
        self.ledger.lend(LeaseKey.write(leg), 3)
        return leg

    def close(self, leg: Leg, kind: ProofKind = ProofKind.DRAINED) -> None:
        key = LeaseKey.write(leg)
        assert self.ledger.close(key, Proof.spoken(kind, key))

    def counted(self, name: str) -> tuple[float, float]:
        found = {sample.name: sample.value for sample in self.holds.samples()}
        return found[f"quiesce:{name}_count"], found[f"quiesce:{name}_sum"]


def test_a_hold_lasts_from_the_requests_end_to_the_return_of_its_pages() -> None:
    rig = Rig()
    leg = rig.lent()
    rig.now += 7.0
    rig.ledger.end(leg.tid)
    assert len(rig.holds) == 1
    rig.now += 2.5
    assert rig.holds.oldest() == 2.5
    rig.close(leg)
    assert (len(rig.holds), rig.holds.oldest()) == (0, 0.0)
    assert rig.counted("decode_deferred_kv_release_seconds") == (1, 2.5)
    assert rig.holds.outcomes == {"drained": 1}


def test_a_request_that_ends_well_was_never_held() -> None:
    rig = Rig()
    leg = rig.lent()
    rig.close(leg, ProofKind.COMPLETED)
    step = LeaseKey.compute(leg.tid)
    rig.ledger.lend(step)
    rig.ledger.end(leg.tid)  # its own last step is still under way
    rig.now += 1.0
    rig.ledger.close(step, Proof.spoken(ProofKind.COMPLETED, step))
    assert rig.ledger.census().free == 8
    assert rig.counted("decode_deferred_kv_release_seconds") == (0, 0.0) and not rig.holds.outcomes


def test_an_operators_word_is_counted_as_unsound_and_said(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    leg = rig.lent()
    rig.ledger.end(leg.tid)
    with caplog.at_level(logging.WARNING):
        rig.ledger.retain(leg.tid)
        rig.ledger.waive(LeaseKey.write(leg), Waiver("asked for"))
    assert rig.holds.outcomes == {"unsound": 1}
    retained, waived, unsound = caplog.records
    assert {record.transfer for record in caplog.records} == {str(leg.tid)}
    assert "retained" in retained.message and "unsound" in unsound.message
    assert "without proof" in waived.message and "asked for" in waived.message


def test_the_first_answer_to_an_abort_is_timed_once() -> None:
    rig = Rig()
    leg = rig.lent()
    rig.ledger.end(leg.tid)
    rig.holds.said(Abort(leg, "client gone"))
    rig.now += 0.5
    rig.holds.said(Abort(leg, "client gone"))  # a repeat
    rig.holds.heard(Busy(leg, 2))
    rig.now += 5.0
    rig.holds.said(Abort(leg, "client gone"))
    rig.holds.heard(Drained(leg))
    rig.close(leg)
    rig.holds.heard(Drained(leg))  # late and twice
    assert rig.counted("decode_abort_answer_seconds") == (1, 0.5)
    assert not rig.holds._asked and not rig.holds._began and not rig.holds._proofs


def test_answers_that_never_came_are_forgotten_with_the_hold() -> None:
    rig = Rig()
    leg = rig.lent()
    rig.ledger.end(leg.tid)
    rig.holds.said(Abort(leg, "client gone"))
    rig.ledger.close(LeaseKey.write(leg), Proof.gone(P, 3))
    assert rig.holds.outcomes == {"gone": 1}
    assert not rig.holds._asked
