"""Several decode ranks under one leader, with one rule of the log removed each (guard H8)."""

from __future__ import annotations

from typing import Any

from quiesce.core.lender import Lender
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.core.ranks import Entry, RankLender
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_settle = RankLender.settle


@mutant("H8 each", "H8", "each rank commits what has landed there", arenas.LED, (RankLender, "_commit"))
def h8_each(self: RankLender, transfer: Any) -> Any:
    return Lender._commit(self, transfer)


@mutant(
    "H8 release",
    "H8",
    "a rank frees once nothing of it is lent there",
    arenas.LED,
    (RankLender, "settle"),
    (RankLender, "_release"),
)
def h8_release(self: RankLender, tid: Any = None) -> Any:
    told = real_settle(self) if tid is None else []
    for tell in told:
        key = LeaseKey.ranks(tell.tid)  # type: ignore[union-attr]
        self.ledger.close(key, Proof.spoken(ProofKind.COMPLETED, key))
    return told


@mutant("H8 order", "H8", "entries of the log are applied as they come", arenas.LED, (RankLender, "apply"))
def h8_order(self: RankLender, entry: Entry) -> Any:
    seen = self._early.setdefault(entry.seq, entry) is not entry
    self.applied = max(self.applied, entry.seq)
    known = self.ledger.knows(entry.what.tid)
    return [] if seen or (not known and entry.seq > 1 and entry.what.tid.seq <= self.high) else self._do(entry.what)


@mutant("H8 silent", "H8", "a failure that only one rank knows is not told", arenas.LED_ALONE, (RankLender, "_hold"),
        live=True)  # fmt: skip
def h8_silent(self: RankLender, transfer: Any, cause: str) -> Any:
    if transfer.cause is None:
        transfer.cause = cause
    return []


@mutant(
    "H8 foreign",
    "H8 H15",
    "a foreign writer that one rank found is not told",
    arenas.LED_DIGEST,
    (RankLender, "on"),
    live=True,
)
def h8_foreign(self: RankLender, event: Any) -> Any:
    return Lender.on(self, event)
