"""`CheckGrant` over the hand-off: is what was read still lent at its source, now that all of it is here (guard L10)?

Each question has a number that was never used before, and only the answer that names it counts: one that was on its
way while the last read was still under way proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from quiesce.core.machine import CheckGrant
from quiesce.core.messages import Check, Leg, Standing, TransferId
from quiesce.core.pulling import Checked
from quiesce.roles.timers import Timers

ASK_FIRST, ASK_MOST = 0.1, 2.0  # seconds between repeats


class GrantChecks:
    """`send(epoch, message)` may lose it: the question is repeated. `outcomes`: answers by what they said."""

    def __init__(self, send: Callable[[int, Check], object], timers: Timers) -> None:
        self._send = send
        self._timers = timers
        self._open: dict[Leg, int] = {}
        self._last = 0
        self.outcomes: Counter[str] = Counter()

    def ask(self, check: CheckGrant) -> None:
        self._last += 1
        self._open[check.leg] = self._last
        self._say(check.leg, 0)

    def _say(self, leg: Leg, attempt: int) -> None:
        if leg in self._open:
            self._send(leg.p_epoch, Check(leg, self._open[leg]))
            delay = min(ASK_MOST, ASK_FIRST * 2 ** min(attempt, 8))
            self._timers.after(delay, ("check", leg), partial(self._say, leg, attempt + 1))

    def heard(self, answer: Standing, speaker: int) -> Checked | None:
        """None: it answers no question that is open."""
        leg = answer.leg
        if leg.p_epoch != speaker or self._open.get(leg) != answer.nonce:
            return None
        self._close(leg)
        self.outcomes["ended" if answer.generation is None else "in_force"] += 1
        return Checked(leg, speaker, answer.generation)

    def forget(self, tid: TransferId) -> None:
        for leg in [leg for leg in self._open if leg.tid == tid]:
            self._close(leg)

    def _close(self, leg: Leg) -> None:
        del self._open[leg]
        self._timers.cancel(("check", leg))

    def __len__(self) -> int:
        return len(self._open)
