"""Giving a transfer up: HOLDING, ABORT, and the proofs and fences that end it (protocol, sections 3 and 5).

`Holdings` is the half of the lender that starts where a hand-off fails, in push and in pull. Nothing in it looks at
a clock, and nothing in it returns a page: it closes leases, each with its proof, and the ledger does the rest.
"""

from __future__ import annotations

from collections import Counter

from quiesce.core.closed_set import Ids
from quiesce.core.ledger import Ledger
from quiesce.core.lending import End, NotRevoked, PeerLost, Published, Revoked, State, Transfer
from quiesce.core.machine import Action, Arm, Closed, Fired, Lost, Revoke, Send, Timer
from quiesce.core.messages import (
    Abort,
    Busy,
    Done,
    Drained,
    Failed,
    Leg,
    NeverStarted,
    Refused,
    Tainted,
    TransferId,
)
from quiesce.core.proofs import LeaseKey, Proof, ProofKind, Waiver

ACCESS_REVOKED = "the peer's access was revoked"
BUSY_DEFERRALS = 4  # holds that BUSY may add before a costly fence is asked for anyway


class Holdings:
    """`epoch` is this process's; `expiry` is `hold` or, for operators who want upstream's behaviour, `release`;
    `page_fence`: the transport can fence a transfer's pages and leave the peer's other transfers alone."""

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        *,
        rank: int = 0,
        expiry: str = "hold",
        costly_fence: bool = False,
        page_fence: bool = False,
        ids: Ids | None = None,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.ids = ids or Ids(epoch)  # shared by every machine of a process that mints ids
        self.ledger = ledger
        self.expiry = expiry
        self.costly_fence = costly_fence
        self.page_fence = page_fence
        self.transfers: dict[TransferId, Transfer] = {}
        self._by_peer: dict[int, dict[TransferId, Transfer]] = {}  # by the epochs of its ranks: the same once more
        self._quarantined: dict[TransferId, Transfer] = {}
        self.stale = 0
        self.ended: Counter[str] = Counter()
        # (peer epoch, pages or None for all) -> generation a fence is running for
        self._fencing: dict[tuple[int, frozenset[int] | None], int] = {}
        self._granted: dict[int, int] = {}  # peer epoch -> newest generation it was ever granted

    @property
    def high(self) -> int:
        return self.ids.high

    def _key(self, leg: Leg) -> LeaseKey:
        """The lease of one peer: its rank and its epoch are whom to ask, to fence and to believe."""
        return LeaseKey.write(leg)

    def _before_close(self, peer: Published) -> None:
        """Something of this lease may be returned next."""

    def _add(self, transfer: Transfer) -> None:
        self.transfers[transfer.tid] = transfer
        for epoch in transfer.ranks.values():
            self._by_peer.setdefault(epoch, {})[transfer.tid] = transfer

    def _remove(self, transfer: Transfer) -> None:
        del self.transfers[transfer.tid]
        self._quarantined.pop(transfer.tid, None)
        for epoch in set(transfer.ranks.values()):
            of_peer = self._by_peer[epoch]
            del of_peer[transfer.tid]
            if not of_peer:
                del self._by_peer[epoch]

    def _of(self, epoch: int) -> list[Transfer]:
        return list(self._by_peer.get(epoch, {}).values())

    def _drop(self) -> list[Action]:
        self.stale += 1
        return []

    def local(self, pages: int) -> TransferId | None:
        """Pages and an id for a request that needs no hand-off (it was retracted and computes its prompt again).
        Never offered to anybody, so it is the ledger's alone."""
        tid = self.ids.next
        return None if self.ledger.own(tid, pages) is None else self.ids.mint()

    # ------------------------------------------------------------ the closed set

    def listed(self) -> list[int]:
        """Seqs of which the other side must not forget anything yet (guard N5)."""
        return [t.tid.seq for t in self.transfers.values() if t.state is not State.COMMITTED]

    def closed_set(self) -> tuple[int, int, list[int]]:
        """(counter, high, open seqs) where nothing else uses this process's ids."""
        return self.ids.closed_set(self.listed())

    # ------------------------------------------------------------ giving up

    def _end(self, transfer: Transfer, event: End) -> list[Action]:
        return self._hold(transfer, event.reason)

    def _failed(self, transfer: Transfer, message: Failed) -> list[Action]:
        return self._hold(transfer, message.reason)

    def _deadline(self, transfer: Transfer, event: Fired) -> list[Action]:
        return self._hold(transfer, "the transfer's deadline passed")

    def _hold(self, transfer: Transfer, cause: str) -> list[Action]:
        """HOLDING first, then ABORT to every rank that may have seen the offer (guards N1, N2)."""
        transfer.state = State.HOLDING
        transfer.cause = cause
        transfer.repeats = 0
        self.ledger.end(transfer.tid)
        actions: list[Action] = [Lost(transfer.tid, cause)]
        if self._all_proven(transfer):
            return actions + self._closed(transfer, cause)
        return [*actions, *self._aborts(transfer), *self._again(transfer), Arm(Timer.HOLD, transfer.tid)]

    def _aborts(self, transfer: Transfer) -> list[Action]:
        reason = transfer.cause or "given up"
        return [
            Send(self._key(peer.offer.leg).epoch, Abort(peer.offer.leg, reason))
            for peer in transfer.published.values()
            if not peer.proven
        ]

    def _repeat_abort(self, transfer: Transfer, event: Fired) -> list[Action]:
        return self._aborts(transfer) + self._again(transfer)

    def _again(self, transfer: Transfer) -> list[Action]:
        transfer.repeats += 1
        return [Arm(Timer.REPEAT, transfer.tid, transfer.repeats - 1)]

    # ------------------------------------------------------------ proofs

    def _done_in_holding(self, transfer: Transfer, message: Done) -> list[Action]:
        """A proof for this rank, never a reason to commit (guard L4)."""
        transfer.published[self._key(message.leg).rank].done = message
        return self._prove_and_close(transfer, message.leg, ProofKind.COMPLETED)

    def _drained(self, transfer: Transfer, message: Drained) -> list[Action]:
        return self._prove_and_close(transfer, message.leg, ProofKind.DRAINED)

    def _never_started(self, transfer: Transfer, message: NeverStarted) -> list[Action]:
        return self._prove_and_close(transfer, message.leg, ProofKind.NEVER_STARTED)

    def _refused_in_holding(self, transfer: Transfer, message: Refused) -> list[Action]:
        if message.reason != "ended":
            return []
        return self._prove_and_close(transfer, message.leg, ProofKind.NEVER_STARTED)

    def _busy(self, transfer: Transfer, message: Busy) -> list[Action]:
        transfer.published[self._key(message.leg).rank].busy = True
        return []

    def _tainted(self, transfer: Transfer, message: Tainted) -> list[Action]:
        peer = transfer.published[self._key(message.leg).rank]
        if peer.proven or peer.tainted:
            return []  # repeats start no second fence (guard H17)
        peer.tainted = True
        return self._revoke_all([peer])

    def _prove(self, transfer: Transfer, leg: Leg, kind: ProofKind) -> None:
        key = self._key(leg)
        peer = transfer.published[key.rank]
        if not peer.proven:
            self._before_close(peer)
            peer.proven = self.ledger.close(key, Proof.spoken(kind, key))

    def _prove_and_close(self, transfer: Transfer, leg: Leg, kind: ProofKind) -> list[Action]:
        self._prove(transfer, leg, kind)
        return self._close_if_proven(transfer)

    def _all_proven(self, transfer: Transfer) -> bool:
        return all(peer.proven for peer in transfer.published.values())

    def _close_if_proven(self, transfer: Transfer) -> list[Action]:
        if transfer.state is State.HOLDING and self._all_proven(transfer):
            return self._closed(transfer, transfer.cause or "given up")
        return []

    def _finish(self, transfer: Transfer, event: End) -> list[Action]:
        """A committed request is over: nothing is lent to a peer any more, so this is the ledger's alone."""
        self.ledger.end(transfer.tid)
        return self._closed(transfer, event.reason)

    def _closed(self, transfer: Transfer, reason: str) -> list[Action]:
        self._remove(transfer)
        self.ended["committed" if transfer.state is State.COMMITTED else transfer.state.value] += 1
        return [Closed(transfer.tid)]

    # ------------------------------------------------------------ fences

    def _hold_expired(self, transfer: Transfer, event: Fired) -> list[Action]:
        """Time is not a proof: it starts a fence (guard H11)."""
        unproven = [peer for peer in transfer.published.values() if not peer.proven]
        if self.expiry == "release":
            for peer in unproven:
                waiver = Waiver(f"--on-hold-expiry=release: {transfer.cause}")
                self._before_close(peer)
                peer.proven = self.ledger.waive(self._key(peer.offer.leg), waiver)
            return self._close_if_proven(transfer)
        if self.costly_fence and any(peer.busy and peer.deferrals < BUSY_DEFERRALS for peer in unproven):
            for peer in unproven:
                peer.busy, peer.deferrals = False, peer.deferrals + 1
            return [Arm(Timer.HOLD, transfer.tid, event.attempt + 1)]
        return self._revoke_all(unproven)  # retained only if that cannot be had

    def _refence(self, transfer: Transfer, event: Fired) -> list[Action]:
        return self._revoke_all([p for p in transfer.published.values() if not p.proven])

    def _revoke_all(self, peers: list[Published]) -> list[Action]:
        actions: list[Action] = []
        for peer in peers:
            leg = peer.offer.leg
            pages = frozenset(self.ledger.pages(leg.tid)) if self.page_fence else None
            asked = Revoke(self._key(leg).epoch, peer.offer.grant.generation, self._asks_death(peer), pages)
            if self._fencing.get((asked.epoch, pages), -1) < asked.generation:
                self._fencing[asked.epoch, pages] = asked.generation
                actions.append(asked)
        return actions

    def _asks_death(self, peer: Published) -> bool:
        return peer.lost

    def _answered(self, proof: Proof) -> None:
        """No fence runs any more for what this proof is about, be it for some of its pages only."""
        exact = self._fencing.get((proof.epoch, proof.pages))
        if exact is not None and proof.pages is not None and (proof.generation is None or exact <= proof.generation):
            del self._fencing[proof.epoch, proof.pages]  # without a look at all others, which may be many
            return
        for (epoch, pages), generation in list(self._fencing.items()):
            apart = pages is not None and proof.pages is not None and pages.isdisjoint(proof.pages)
            if epoch == proof.epoch and not apart and (proof.generation is None or generation <= proof.generation):
                del self._fencing[epoch, pages]

    def _peer_lost(self, event: PeerLost) -> list[Action]:
        actions: list[Action] = []
        for transfer in self._of(event.epoch):
            bound = [rank for rank, epoch in transfer.ranks.items() if epoch == event.epoch]
            unproven = [p for rank, p in transfer.published.items() if rank in bound and not p.proven]
            unpublished = any(rank not in transfer.published for rank in bound)
            for peer in unproven:
                peer.lost = True
            if transfer.state in (State.RESERVED, State.OFFERED) and (unproven or unpublished):
                actions += self._hold(transfer, event.reason)
            if transfer.state is State.HOLDING:
                actions += self._revoke_all(unproven)
        return actions

    def _revoked(self, event: Revoked) -> list[Action]:
        """Closes what it covers and nothing else; what it covers and was still under way never commits."""
        proof = event.proof
        self._answered(proof)
        actions: list[Action] = []
        for transfer in self._of(proof.epoch):
            for peer in transfer.published.values():
                key = self._key(peer.offer.leg)
                if peer.proven or not proof.covers(key, peer.offer.grant.generation):
                    continue
                if proof.pages is not None and proof.pages.isdisjoint(self.ledger.pages(transfer.tid)):
                    continue  # a fence of another transfer's pages
                if transfer.state in (State.RESERVED, State.OFFERED):
                    actions += self._hold(transfer, ACCESS_REVOKED)
                self._before_close(peer)
                peer.proven = peer.proven or self.ledger.close(key, proof)
                if not peer.proven:  # it covered some pages only: the rest is asked for again
                    actions.append(Arm(Timer.REFENCE, transfer.tid))
            actions += self._close_if_proven(transfer)
        for transfer in list(self._quarantined.values()):
            actions += self._absolve(transfer, proof)
        return actions

    def _absolve(self, transfer: Transfer, proof: Proof) -> list[Action]:
        """A fence of every accused peer, each as wide as what that peer could write (guards H15, H16)."""
        owed = transfer.accused.get(proof.epoch)
        narrow = proof.pages is not None and not proof.pages.issuperset(self.ledger.pages(transfer.tid))
        if owed is None or narrow or (proof.generation is not None and proof.generation < owed):
            return []
        del transfer.accused[proof.epoch]
        if transfer.accused:
            return []
        key = LeaseKey.foreign(transfer.tid)
        self.ledger.close(key, Proof(ProofKind.FENCED, epoch=0, tid=transfer.tid))
        return self._closed(transfer, transfer.cause or "quarantine")

    def _not_revoked(self, event: NotRevoked) -> list[Action]:
        if self._fencing.get((event.epoch, event.pages)) == event.generation:
            del self._fencing[event.epoch, event.pages]
        actions: list[Action] = []
        for transfer in self._of(event.epoch):
            about = event.pages is None or not event.pages.isdisjoint(self.ledger.pages(transfer.tid))
            if (
                about
                and transfer.state is State.HOLDING
                and any(
                    not p.proven and self._key(p.offer.leg).epoch == event.epoch for p in transfer.published.values()
                )
            ):
                self.ledger.retain(transfer.tid)
                transfer.repeats += 1
                actions.append(Arm(Timer.REFENCE, transfer.tid, transfer.repeats))
        return actions
