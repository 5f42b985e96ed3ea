"""Who watches the ledger of a worker: the page log, the meters of holds and the budget for them.

None of them may stand between a write that has landed and pages that are free. Inside `with watchers:` a machine has
its turn, and what they are to hear of leases that closed and pages that returned waits until its answers are sent.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType

from quiesce.core.ledger import Change, Ledger, Observer
from quiesce.roles.ownership import OwnershipLog

CAN_WAIT = ("closed", "returned")  # of the others somebody reads what the ledger looks like just then


class Watchers:
    """Set `observe` as the ledger's observer. `others` hear of everything that `log` does, behind it."""

    def __init__(self, ledger: Ledger, log: OwnershipLog, *others: Observer) -> None:
        self._ledger = ledger
        self._log = log
        self._all: tuple[Observer, ...] = (log.observe, *others)
        self._waiting: deque[Change] = deque()
        self._turns = 0  # of machines that are under way, one inside the other

    def observe(self, change: Change) -> None:
        if change.of_a_step:
            self._log.name(change.tid)
        elif self._turns and change.event in CAN_WAIT:
            self._waiting.append(change)
        else:
            self._tell_waiting()
            for observer in self._all:
                observer(change)

    def __enter__(self) -> None:
        self._turns += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._turns -= 1
        if not self._turns:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        while self._waiting:
            change = self._waiting.popleft()
            for observer in self._all:
                self._ledger.tell(observer, change)
