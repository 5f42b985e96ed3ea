"""The two machines of pull with one guard removed each, and a transport that promises less than it must."""

from __future__ import annotations

import dataclasses
from typing import Any

from quiesce.core import pull_lender, pull_reader
from quiesce.core.borrower import Outcome
from quiesce.core.borrowing import PostEnded
from quiesce.core.lending import End, State
from quiesce.core.machine import CheckGrant, Timer
from quiesce.core.messages import Drained
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.core.pull_lender import PullLender
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import Checked, Computed
from quiesce.lab.checker.processes import FLYING, LOOSE
from quiesce.lab.checker.pull import PullModel
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_check = PullReader._check_if_landed
real_own_post = PullReader._own_post
real_lend = PullLender._lend


@mutant(
    "N10",
    "N10",
    "a reader that gives up does not say so, and its PINGs renew whatever they list",
    arenas.PULL_LIVE,
    (PullReader, "_aborts"),
    (PullReader, "reading"),
    live=True,
)
def n10(self: PullReader, transfer: Any = None) -> Any:
    return tuple(self.listed()) if transfer is None else []


@mutant("L10", "L10", "nothing is checked after landing", arenas.PULL_CRASH, (PullReader, "_check_if_landed"))
def l10(self: PullReader, transfer: Any, reading: Any) -> Any:
    actions: list[Any] = real_check(self, transfer, reading)
    for check in actions:
        actions = actions + self._checked(transfer, Checked(check.leg, check.leg.p_epoch, check.grant.generation))
    return actions


@mutant(
    "L10 early",
    "L10",
    "the check begins with the first PLACED, not after the last",
    arenas.PULL_CHUNKS,
    (PullReader, "_check_if_landed"),
    (pull_reader.TABLE, (State.OFFERED, Checked)),
)
def l10_early(self: PullReader, transfer: Any, what: Any) -> Any:
    reading = transfer.published[0]
    leg, grant = reading.offer.leg, reading.offer.grant
    if isinstance(what, Checked):  # while the last read is under way
        reading.checked = (what.epoch, what.generation) == (leg.p_epoch, grant.generation)
    elif not reading.count and reading.checked:
        self._prove(transfer, leg, ProofKind.COMPLETED)
        return self._checked(transfer, Checked(leg, leg.p_epoch, grant.generation))
    return [] if isinstance(what, Checked) else [CheckGrant(leg, grant)]


@mutant(
    "L10 free",
    "L10 H11",
    "silence frees, for the reader's check will find it out",
    arenas.PULL,
    (pull_lender.TABLE, (State.OFFERED, Timer.LEASE)),
)
def l10_free(self: PullLender, transfer: Any, event: Any) -> Any:
    return self._given_up(transfer, Drained(self._leg(transfer)))


@mutant(
    "H14 pull",
    "H14",
    "source pages are not lent to the reader",
    arenas.PULL,
    (pull_lender.TABLE, (State.RESERVED, Computed)),
)
def h14(self: PullLender, transfer: Any, event: Any) -> Any:
    actions = real_lend(self, transfer, event)
    key = LeaseKey.source(self._leg(transfer))
    self.ledger.close(key, Proof.spoken(ProofKind.COMPLETED, key))
    return actions


@mutant(
    "H11 pull",
    "H11",
    "the hold timer of the source frees",
    arenas.PULL,
    (pull_lender.TABLE, (State.HOLDING, Timer.HOLD)),
)
def h11(self: PullLender, transfer: Any, event: Any) -> Any:
    return self._drained(transfer, Drained(self._leg(transfer)))


@mutant(
    "H1 pull",
    "H1",
    "a reader that gives up frees at once",
    arenas.PULL,
    (pull_reader.TABLE, (State.OFFERED, End)),
)
def h1(self: PullReader, transfer: Any, event: Any) -> Any:
    for reading in transfer.published.values():
        self._prove(transfer, reading.offer.leg, ProofKind.DRAINED)
    return self._hold(transfer, "ended")


@mutant("A9 pull", "A9", "an UNKNOWN read counts as drained", arenas.PULL_TAINT, (PullReader, "_own_post"))
def a9(self: PullReader, event: Any) -> Any:
    if isinstance(event, PostEnded) and event.outcome is Outcome.UNKNOWN:
        event = dataclasses.replace(event, outcome=Outcome.FAILED_CLEAN)
    return real_own_post(self, event)


@mutant(
    "closed set pull",
    "N9",
    "an id is not listed any more once it is given up",
    arenas.PULL_PINGS,
    (PullReader, "listed"),
)
def listed(self: PullReader) -> Any:
    return [t.tid.seq for t in self.transfers.values() if t.state in pull_reader.UNDER_WAY]


@mutant(
    "pull fence: flush", "H16", "a fence that lets later reads through", arenas.PULL_FENCE, (PullModel, "_launch")
)
def flush(self: PullModel, number: int, decodes: Any, prefills: Any) -> int:
    return number * 4 + FLYING


@mutant("pull placement", "A14", "reads land by address, not by epoch", arenas.PULL_RESTART, (PullModel, "_bound"))
def placement(self: PullModel, posts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted((post & ~3) | LOOSE for post in posts if not post & 1))
