"""The check after landing as a conversation: only the answer to this very question counts (guard L10)."""

from __future__ import annotations

from quiesce.core.machine import CheckGrant
from quiesce.core.messages import Check, Grant, Leg, Standing, TransferId
from quiesce.core.pulling import Checked
from quiesce.roles.grant_checks import ASK_FIRST, ASK_MOST, GrantChecks
from quiesce.roles.timers import Delays, Timers

D, P = 13, 16
GRANT = Grant(0, 5, (1, 2))


def leg(seq: int = 1) -> Leg:
    return Leg(TransferId(D, seq), 0, 0, P)


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[tuple[int, Check]] = []
        self.timers = Timers(Delays(), now=lambda: self.now)
        self.checks = GrantChecks(lambda to, message: self.sent.append((to, message)), self.timers)

    def ask(self, seq: int = 1) -> int:
        self.checks.ask(CheckGrant(leg(seq), GRANT))
        to, question = self.sent[-1]
        assert to == P and question.leg == leg(seq)
        return question.nonce

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for due in self.timers.due():
            assert callable(due)
            due()


def test_l10_an_answer_to_an_earlier_question_is_none() -> None:
    rig = Rig()
    first = rig.ask()
    rig.checks.forget(leg().tid)
    second = rig.ask(2)
    assert second != first
    for stale in (Standing(leg(), first, 5), Standing(leg(2), first, 5), Standing(leg(3), second, 5)):
        assert rig.checks.heard(stale, P) is None
    assert rig.checks.heard(Standing(leg(2), second, 5), P + 1) is None, "somebody else's word"
    assert rig.checks.heard(Standing(leg(2), second, 5), P) == Checked(leg(2), P, 5)
    assert rig.checks.heard(Standing(leg(2), second, 5), P) is None, "answered once"
    assert rig.checks.outcomes == {"in_force": 1}


def test_l10_what_is_not_in_force_is_said_to_be_so() -> None:
    rig = Rig()
    assert rig.checks.heard(Standing(leg(), rig.ask(), None), P) == Checked(leg(), P, None)
    assert rig.checks.outcomes == {"ended": 1}


def test_a_lost_question_is_asked_again_until_it_is_answered_or_pointless() -> None:
    rig = Rig()
    nonce = rig.ask()
    for _ in range(6):
        rig.wait(ASK_MOST)
    assert len(rig.sent) == 7 and {question.nonce for _, question in rig.sent} == {nonce}
    rig.checks.heard(Standing(leg(), nonce, 5), P)
    rig.ask(2)
    rig.wait(ASK_FIRST)
    assert len(rig.sent) == 9
    rig.checks.forget(leg(2).tid)
    rig.wait(ASK_MOST)
    assert len(rig.sent) == 9 and not len(rig.checks) and not len(rig.timers)
