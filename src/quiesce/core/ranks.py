"""Several ranks of one decode engine: one decides, all follow (protocol, section 3; guard H8). No role uses it yet.

Each rank has a `RankLender` of its own, with its own pages. What it finds out it tells the `Leader`, who belongs to
rank 0: that a transfer has landed here, that it has failed here, that nothing of it is lent any more here. What is to
be done about it the leader alone decides, once, in one log that all apply in order. Free pages are therefore the same
number on every rank at the same place of the log, and what the leader admits every rank can hold.

Entries and reports may be lost, repeated and out of order between the ranks; both sides say again what is not
answered. A rank that dies ends the engine: its successor has a new epoch and an empty log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quiesce.core.holding import Holdings
from quiesce.core.ledger import Ledger
from quiesce.core.lender import Lender
from quiesce.core.lending import End, Event, State, Transfer, Verified
from quiesce.core.machine import Action, Closed, Tell
from quiesce.core.messages import TransferId
from quiesce.core.proofs import LeaseKey, Proof, ProofKind


class RanksDiffer(AssertionError):
    """A rank cannot do what the leader decided. Never to be caught: the engine must end."""


class Decision(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """About one transfer, the same on every rank."""

    tid: TransferId


class Reserve(Decision, frozen=True):
    """Take pages. `ranks`: prefill rank and epoch; none: it is computed here."""

    ranks: tuple[tuple[int, int], ...]
    room: int
    pairing: bytes
    tokens: int
    pages: int
    prefix: int


class Grow(Decision, frozen=True):
    pages: int


class Commit(Decision, frozen=True):
    """It has landed on every rank."""


class Hold(Decision, frozen=True):
    """It is given up on every rank, whatever each of them knows of it."""

    cause: str


class Finish(Decision, frozen=True):
    """A request that runs is over."""

    reason: str


class Release(Decision, frozen=True):
    """Nothing of it is lent any more on any rank: its pages go back, here and now, on every rank."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    epoch: int  # of the engine
    seq: int
    what: Reserve | Grow | Commit | Hold | Finish | Release


class Report(msgspec.Struct, frozen=True, array_like=True):
    """From one rank to the leader. `applied`: every entry up to it was; `tid` None: nothing else is said."""

    epoch: int
    rank: int
    applied: int
    what: Literal["", "landed", "failed", "proven"] = ""
    tid: TransferId | None = None
    cause: str = ""


class RankLender(Lender):
    """One rank: it reports instead of deciding, and does what the log says. `Tell` actions are for the leader."""

    def __init__(
        self, epoch: int, ledger: Ledger, *, rank: int, costly_fence: bool = False, page_fence: bool = False
    ) -> None:
        super().__init__(epoch, ledger, rank=rank, costly_fence=costly_fence, page_fence=page_fence)
        self.applied = 0
        self._early: dict[int, Entry] = {}  # came before the one that is to be applied first
        self._ending: dict[TransferId, None] = {}  # over here, but not released
        self._unanswered: dict[TransferId, Tell] = {}

    # ------------------------------------------------------------ what is told

    def repeats(self) -> list[Report]:
        """Everything the leader has not answered yet."""
        told = [self.report(tell) for tell in self._unanswered.values()]
        return told or [Report(self.epoch, self.rank, self.applied)]

    def report(self, tell: Tell) -> Report:
        return Report(self.epoch, self.rank, self.applied, tell.what, tell.tid, tell.cause)

    def _tell(self, tell: Tell) -> list[Action]:
        self._unanswered[tell.tid] = tell
        return [tell]

    def settle(self) -> list[Action]:
        """To be called when a step of our own has ended: what was lent to it may have been the last."""
        told: list[Action] = []
        for tid in list(self._ending):
            if self.ledger.leases(tid) == (LeaseKey.ranks(tid),):
                del self._ending[tid]
                told += self._tell(Tell(tid, "proven"))
        return told

    # ------------------------------------------------------------ reports where a single rank would decide

    def _hold(self, transfer: Transfer, cause: str) -> list[Action]:
        """The first cause is told; it is given up when the log says so."""
        if transfer.cause is not None:
            return []
        transfer.cause = cause
        return self._tell(Tell(transfer.tid, "failed", cause))

    def _land_if_complete(self, transfer: Transfer) -> list[Action]:
        return [] if transfer.cause is not None else super()._land_if_complete(transfer)

    def _commit(self, transfer: Transfer) -> list[Action]:
        return self._tell(Tell(transfer.tid, "landed"))

    def on(self, event: Event) -> list[Action]:
        actions = super().on(event)
        transfer = self.transfers.get(event.tid) if isinstance(event, Verified) else None
        if transfer is not None and transfer.state is State.QUARANTINE:
            actions += self._tell(Tell(transfer.tid, "failed", transfer.cause or "quarantine"))
        return actions

    def _closed(self, transfer: Transfer, reason: str) -> list[Action]:
        """Closed here: the pages stay until all ranks have said so."""
        super()._closed(transfer, reason)
        self._ending[transfer.tid] = None
        return self.settle()

    # ------------------------------------------------------------ the log

    def apply(self, entry: Entry) -> list[Action]:
        """Entries in their order, each once, whenever they come. Raises RanksDiffer."""
        if entry.epoch != self.epoch:
            return self._drop()
        if entry.seq <= self.applied:
            return []
        self._early[entry.seq] = entry
        actions: list[Action] = []
        while (due := self._early.pop(self.applied + 1, None)) is not None:
            self.applied += 1
            actions += self._do(due.what)
        return actions

    def _do(self, what: Decision) -> list[Action]:
        transfer = self.transfers.get(what.tid)
        match what:
            case Reserve():
                return self._reserve(what)
            case Grow(tid, pages):
                if self.ledger.grow(tid, pages) is None:
                    raise RanksDiffer(f"rank {self.rank} has not the {pages} pages by which {tid} is to grow")
                return []
            case Commit(tid):
                if transfer is None or transfer.state is not State.LANDED:
                    raise RanksDiffer(f"rank {self.rank} is to commit {tid}, which has not landed here")
                del self._unanswered[tid]
                return Lender._commit(self, transfer)
            case Hold(tid, cause):
                self._unanswered.pop(tid, None)
                return [] if transfer is None else self._give_up(transfer, cause)
            case Finish(tid, reason):
                if transfer is not None and transfer.state is not State.COMMITTED:
                    raise RanksDiffer(f"rank {self.rank} is to finish {tid}, which does not run here")
                if transfer is not None:
                    return self._finish(transfer, End(tid, reason))
                self.ledger.end(tid)
                self._ending[tid] = None
                return self.settle()
            case Release(tid):
                return self._release(tid)
        raise RanksDiffer(f"rank {self.rank} does not know what {what} is")

    def _reserve(self, what: Reserve) -> list[Action]:
        if what.tid != self.ids.next or self.ledger.own(what.tid, what.pages) is None:
            raise RanksDiffer(
                f"rank {self.rank} cannot take {what.pages} pages for {what.tid}: {self.ledger.census()}"
            )
        self.ids.mint()
        self.ledger.lend(LeaseKey.ranks(what.tid))
        if what.ranks:
            ranks = dict(what.ranks)
            self._add(Transfer(what.tid, what.room, what.pairing, what.tokens, what.prefix, ranks))
        return []

    def _give_up(self, transfer: Transfer, cause: str) -> list[Action]:
        if transfer.state is State.QUARANTINE:
            return []  # given up already, and held for longer than the rest
        actions = Holdings._hold(self, transfer, cause)
        if transfer.state is State.HOLDING:
            actions += self._revoke_all([p for p in transfer.published.values() if p.lost and not p.proven])
        return actions

    def _release(self, tid: TransferId) -> list[Action]:
        key = LeaseKey.ranks(tid)
        self._unanswered.pop(tid, None)
        if not self.ledger.close(key, Proof.spoken(ProofKind.COMPLETED, key)) or self.ledger.knows(tid):
            raise RanksDiffer(f"rank {self.rank} is to release {tid}, of which something is lent here")
        return [Closed(tid)]


@dataclass(slots=True)
class Judged:
    """What the leader knows of one transfer."""

    decided: Literal["", "commit", "hold", "finish"] = ""
    landed: set[int] = field(default_factory=set)
    proven: set[int] = field(default_factory=set)


class Leader:
    """Decides for `ranks` ranks. `own` is its own rank's lender, through which its entries are applied at once. What
    a method returns is for the caller to carry out; `new()` gives the entries that are to be sent to the others."""

    def __init__(self, own: RankLender, ranks: int, *, most_log: int = 65_536) -> None:
        self.own = own
        self.ranks = ranks
        self.most_log = most_log
        self.seq = 0
        self.log: dict[int, Entry] = {}  # not applied by every rank yet
        self.judged: dict[TransferId, Judged] = {}
        self._applied = dict.fromkeys(range(ranks), 0)
        self._unsent: list[Entry] = []

    # ------------------------------------------------------------ the log

    def new(self) -> list[Entry]:
        entries, self._unsent = self._unsent, []
        return entries

    def repeats(self) -> Iterator[tuple[int, Entry]]:
        """(rank, entry) for what a rank has not said it has applied."""
        for rank, applied in self._applied.items():
            for seq, entry in self.log.items():
                if rank != self.own.rank and seq > applied:
                    yield rank, entry

    def _decide(self, what: Reserve | Grow | Commit | Hold | Finish | Release) -> list[Action]:
        self.seq += 1
        entry = Entry(self.own.epoch, self.seq, what)
        if self.ranks > 1:
            self.log[self.seq] = entry
            self._unsent.append(entry)
        return self.hear_own(self.own.apply(entry))

    # ------------------------------------------------------------ admission

    def reserve(
        self,
        ranks: Mapping[int, int],
        *,
        room: int,
        pairing: bytes,
        tokens: int,
        pages: int,
        prefix: int = 0,
    ) -> TransferId | None:
        """Pages on every rank, or None when there is no room now. With `ranks` empty it needs no hand-off."""
        ledger = self.own.ledger
        if pages > ledger.pool.free or not ledger.rows.free or len(self.log) >= self.most_log:
            return None
        tid = self.own.ids.next
        self.judged[tid] = Judged("" if ranks else "commit")
        self._decide(Reserve(tid, tuple(sorted(ranks.items())), room, pairing, tokens, pages, prefix))
        return tid

    def grow(self, tid: TransferId, pages: int) -> bool:
        if pages > self.own.ledger.pool.free:
            return False
        self._decide(Grow(tid, pages))
        return True

    def end(self, tid: TransferId, reason: str) -> list[Action]:
        """The request ends, for whatever reason. Ending twice is harmless."""
        judged = self.judged.get(tid)
        if judged is None or judged.decided in ("hold", "finish"):
            return []
        if judged.decided == "commit":
            judged.decided = "finish"
            return self._decide(Finish(tid, reason))
        judged.decided = "hold"
        return self._decide(Hold(tid, reason))

    # ------------------------------------------------------------ what the ranks say

    def hear_own(self, actions: list[Action]) -> list[Action]:
        """What the leader's own rank tells is heard at once; the rest is for the caller."""
        left: list[Action] = []
        for action in actions:
            left += self.hear(self.own.report(action)) if isinstance(action, Tell) else [action]
        return left

    def hear(self, report: Report) -> list[Action]:
        if report.epoch != self.own.epoch or report.rank not in self._applied:
            return []
        if report.applied > self._applied[report.rank]:
            self._applied[report.rank] = report.applied
            self._forget()
        tid = report.tid
        judged = None if tid is None else self.judged.get(tid)
        if tid is None or judged is None:
            return []
        if report.what == "proven" and judged.decided in ("hold", "finish"):
            judged.proven.add(report.rank)
            if len(judged.proven) == self.ranks:
                del self.judged[tid]
                return self._decide(Release(tid))
        elif report.what == "landed" and not judged.decided:
            judged.landed.add(report.rank)
            if len(judged.landed) == self.ranks:
                judged.decided = "commit"
                return self._decide(Commit(tid))
        elif report.what == "failed" and not judged.decided:
            judged.decided = "hold"
            return self._decide(Hold(tid, report.cause))
        return []

    def _forget(self) -> None:
        followers = [applied for rank, applied in self._applied.items() if rank != self.own.rank]
        everywhere = min(followers, default=self.seq)
        while self.log and (first := next(iter(self.log))) <= everywhere:
            del self.log[first]
