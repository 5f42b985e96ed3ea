"""The lender, its ledger and its proofs with one guard removed each."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from quiesce.core import lender as module
from quiesce.core.ledger import Ledger
from quiesce.core.lender import PEER_TABLE, TABLE, Lender, State, Transfer
from quiesce.core.lending import End, PeerLost
from quiesce.core.machine import Heard, Timer
from quiesce.core.messages import Done, Failed, Refused
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_release = Ledger._release_if_free
real_end = Ledger.end
real_close = Ledger.close
real_heard = Lender._heard
real_publish = Lender._publish
real_prove = Lender._prove
real_hold = Lender._hold
real_land = Lender._land_if_complete
real_aborts = Lender._aborts
real_covers = Proof.covers


def completed(self: Lender, transfer: Transfer) -> None:
    for peer in transfer.published.values():
        real_prove(self, transfer, peer.offer.leg, ProofKind.COMPLETED)


# ---------------------------------------------------------------- holding


@mutant("H1", "H1", "pages return with their owner, open leases or not", arenas.TWO, (Ledger, "_release_if_free"))
def h1(self: Ledger, tid: Any, holding: Any) -> bool:
    if not holding.owned:
        self.closed_by["nothing"] += len(holding.leases)
        holding.leases.clear()
    return real_release(self, tid, holding)


@mutant("H2", "H2", "the row returns with the request, its pages later", arenas.TWO, (Ledger, "end"))
def h2(self: Ledger, tid: Any) -> bool:
    holding = self._holdings.get(tid)
    if holding is not None and holding.owned:
        self._return_rows(holding.rows)
        holding.rows = ()
    return real_end(self, tid)


@mutant("H3 client", "H3 R4", "whoever says that the client is gone frees", arenas.TWO, (TABLE, (State.OFFERED, End)))
@mutant("H3 deadline", "H3", "a deadline frees", arenas.TWO, (TABLE, (State.OFFERED, Timer.DEADLINE)))
@mutant("H3 failure", "H3", "one rank's failure frees", arenas.RANKS_FAIL, (TABLE, (State.OFFERED, Failed)))
@mutant("H3 refusal", "H3", "one rank's refusal frees", arenas.RANKS_FULL, (TABLE, (State.OFFERED, Refused)))
@mutant("H11", "H11", "the hold timer frees", arenas.TWO, (TABLE, (State.HOLDING, Timer.HOLD)))
def frees(self: Lender, transfer: Transfer, event: Any) -> Any:
    completed(self, transfer)
    return self._close_if_proven(transfer) if transfer.state is State.HOLDING else self._hold(transfer, "freed")


@mutant("H3 restart", "H3 H16", "a prefill engine that restarts frees", arenas.CRASH, (PEER_TABLE, PeerLost))
def restart_frees(self: Lender, event: PeerLost) -> Any:
    mine = [t for t in self.transfers.values() if event.epoch in t.ranks.values() and t.state is not State.COMMITTED]
    return [action for transfer in mine for action in frees(self, transfer, event)]


@mutant(
    "H4",
    "H4",
    "published is recorded once every send went well",
    arenas.RANKS,
    (TABLE, (State.RESERVED, module.Publish)),
)
def h4(self: Lender, transfer: Transfer, event: Any) -> Any:
    actions = real_publish(self, transfer, event)
    if transfer.state is State.RESERVED:  # a later send has yet to be tried
        real_prove(self, transfer, transfer.published[event.rank].offer.leg, ProofKind.COMPLETED)
    return actions


@mutant("H5", "H5", "what was never published waits for proof all the same", arenas.TWO, (Lender, "_all_proven"))
def h5(self: Lender, transfer: Transfer) -> bool:
    return bool(transfer.published) and all(peer.proven for peer in transfer.published.values())


@mutant("H7", "H7", "a late FAILED makes an entry", arenas.FAULT, (Lender, "_heard"), strict=True)
def h7(self: Lender, event: Heard) -> Any:
    leg: Any = event.message.leg  # type: ignore[union-attr]
    if isinstance(event.message, Failed) and leg.tid not in self.transfers:
        self.transfers[leg.tid] = Transfer(leg.tid, 0, b"", 0, 0, {}, State.HOLDING)
    return real_heard(self, event)


@mutant(
    "H15", "H15", "a digest mismatch ends like any failure", arenas.DIGEST, (TABLE, (State.LANDED, module.Verified))
)
def h15(self: Lender, transfer: Transfer, event: Any) -> Any:
    return self._commit(transfer) if event.matches else self._hold(transfer, "digest mismatch")


@mutant(
    "H15 late",
    "H15 H17",
    "the late report of an older fence ends a quarantine",
    arenas.DIGEST_LATE,
    (TABLE, (State.LANDED, module.Verified)),
)
def h15_late(self: Lender, transfer: Transfer, event: Any) -> Any:
    actions = self._verified(transfer, event)
    transfer.accused = {epoch: self._granted.get(epoch, 0) for epoch in transfer.accused}
    return actions


@mutant("H16 scope", "H16", "a fence of one rank counts for all", arenas.RANKS_FENCE, (Proof, "covers"))
def h16_scope(self: Proof, key: LeaseKey, generation: int) -> bool:
    return self.kind is ProofKind.FENCED or real_covers(self, key, generation)


@mutant("H16 pages", "H16", "a fence of one page counts for all", arenas.NARROW, (Ledger, "close"))
def h16_pages(self: Ledger, key: LeaseKey, proof: Proof) -> bool:
    return real_close(self, key, dataclasses.replace(proof, pages=None))


@mutant("H16 generation", "H16", "a fence counts for later grants", arenas.FENCE_TWICE, (Proof, "covers"))
def h16_generation(self: Proof, key: LeaseKey, generation: int) -> bool:
    return real_covers(self, key, 0)


@mutant(
    "H17",
    "H17",
    "a fence that was not to be had is not asked for again",
    arenas.LIVE_FENCE,
    (PEER_TABLE, module.NotRevoked),
    live=True,
)
def h17(self: Lender, event: Any) -> Any:
    return []


# ---------------------------------------------------------------- telling the other side


@mutant("N1", "N1", "ABORT goes to one rank only", arenas.LIVE_RANKS, (Lender, "_aborts"), live=True)
def n1(self: Lender, transfer: Transfer) -> Any:
    sends: list[Any] = real_aborts(self, transfer)
    return [send for send in sends if send.message.leg.p_rank == 0]


@mutant(
    "N2 + N3",
    "N2 N3",
    "ABORT leaves before HOLDING begins, once",
    arenas.LIVE,
    (Lender, "_hold"),
    (TABLE, (State.HOLDING, Timer.REPEAT)),
    live=True,
)
def n2(self: Lender, transfer: Transfer, event: Any) -> Any:
    if isinstance(event, str) and transfer.cause is None and transfer.published:
        transfer.cause = event  # HOLDING begins with the next repeat
        return real_aborts(self, transfer)
    return real_hold(self, transfer, "late") if transfer.state is not State.HOLDING else []


@mutant("N3", "N3", "ABORT is not repeated", arenas.LIVE, (TABLE, (State.HOLDING, Timer.REPEAT)), live=True)
def n3(self: Lender, transfer: Transfer, event: Any) -> Any:
    return []


# ---------------------------------------------------------------- answers


@mutant("A7", "A7", "proofs are counted, not named", arenas.RANKS, (Lender, "_prove"))
def a7(self: Lender, transfer: Transfer, leg: Any, kind: Any) -> None:
    if transfer.published[leg.p_rank].proven:
        leg = next((p.offer.leg for p in transfer.published.values() if not p.proven), leg)
    real_prove(self, transfer, leg, kind)


@mutant("A13", "A13", "an answer counts for whoever has the room now", arenas.THREE, (Lender, "_heard"))
def a13(self: Lender, event: Heard) -> Any:
    leg: Any = event.message.leg  # type: ignore[union-attr]
    now = [t.published[leg.p_rank].offer.leg for t in self.transfers.values() if leg.p_rank in t.published]
    message = msgspec.structs.replace(event.message, leg=now[-1]) if now else event.message
    return real_heard(self, Heard(message, event.speaker))


# ---------------------------------------------------------------- landing


@mutant("L2", "L2", "the first DONE commits", arenas.RANKS, (Lender, "_land_if_complete"))
def l2(self: Lender, transfer: Transfer) -> Any:
    designated = transfer.published.get(0)
    if transfer.state is not State.OFFERED or designated is None or designated.done is None:
        return []
    completed(self, transfer)
    return self._commit(transfer)


@mutant("L4", "L4", "DONE takes a transfer that was given up back", arenas.TWO, (TABLE, (State.HOLDING, Done)))
def l4(self: Lender, transfer: Transfer, message: Done) -> Any:
    self.ledger._holdings[transfer.tid].owned = True
    self.ledger._move(self.ledger._holdings[transfer.tid], "held", "owned")
    transfer.state = State.OFFERED
    return self._note_done(transfer, message)


@mutant(
    "L5", "L5", "what DONE says it filled is not compared with the offer", arenas.SHORT, (Lender, "_land_if_complete")
)
def l5(self: Lender, transfer: Transfer) -> Any:
    for peer in transfer.published.values():
        if peer.done is not None:
            pages = len(peer.offer.grant.pages)
            peer.done = msgspec.structs.replace(peer.done, pages=pages, tokens=transfer.tokens)
    return real_land(self, transfer)


mutant("L6", "L6", "the last rank speaks for the result", arenas.RANKS, (module, "DESIGNATED_RANK"))(1)
