"""A transfer as seen by the rank whose pages are touched (protocol, section 3).

`Lender` holds every transfer of one decode rank. It does not know what time it is, what a socket is, or which
transport moves the bytes. Read `TABLE` first: a row is (state, event) -> what happens. What has no row changes
nothing; a DONE or FAILED gets its ACK whatever the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from quiesce.core.ledger import Ledger
from quiesce.core.machine import (
    Action,
    Arm,
    Closed,
    Committed,
    Fired,
    Heard,
    Lost,
    Revoke,
    Send,
    Timer,
    Verify,
)
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    Grant,
    Leg,
    NeverStarted,
    Offer,
    Refused,
    Tainted,
    TransferId,
)
from quiesce.core.proofs import LeaseKey, Proof, ProofKind, Waiver

DESIGNATED_RANK = 0  # the one rank whose DONE carries the result (guard L6)
BUSY_DEFERRALS = 4  # holds that BUSY may add before a costly fence is asked for anyway


class State(Enum):
    RESERVED = "reserved"
    OFFERED = "offered"
    LANDED = "landed"
    COMMITTED = "committed"
    HOLDING = "holding"
    QUARANTINE = "quarantine"


@dataclass(slots=True)
class Published:
    """One rank that may have seen the offer: what it was told and what is known of it."""

    offer: Offer
    done: Done | None = None
    proven: bool = False
    accepted: bool = False
    busy: bool = False
    tainted: bool = False
    lost: bool = False  # its epoch is dead or replaced: GONE is what to ask for
    deferrals: int = 0


@dataclass(slots=True)
class Transfer:
    tid: TransferId
    room: int
    pairing: bytes
    tokens: int  # slots that must be filled
    prefix: int
    ranks: dict[int, int]  # every prefill rank to be offered -> its epoch, bound for good
    state: State = State.RESERVED
    published: dict[int, Published] = field(default_factory=dict)
    cause: str | None = None
    repeats: int = 0
    accused: dict[int, int] = field(default_factory=dict)  # QUARANTINE: epoch -> generation whose fence is owed


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Publish:
    """The offer to one rank is about to be sent."""

    tid: TransferId
    rank: int
    region: int
    generation: int
    remaining_ms: int


@dataclass(frozen=True, slots=True)
class End:
    """The request ends, for whatever reason: client, router, deadline, fault. One door (guard H3)."""

    tid: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    tid: TransferId
    matches: bool
    # When it does not match: epochs of every peer that could have written. Empty: only a restart ends it.
    peers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The bound epoch is dead, replaced, or unreachable for good. Says nothing about its posts."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    proof: Proof


@dataclass(frozen=True, slots=True)
class NotRevoked:
    """The fence could not be had: nothing changes, asking goes on (guard H17)."""

    epoch: int
    generation: int


Event = Heard | Fired | Publish | End | Verified | PeerLost | Revoked | NotRevoked


class Lender:
    """`epoch` is this process's; `expiry` is `hold` or, for operators who want upstream's behaviour, `release`."""

    def __init__(
        self, epoch: int, ledger: Ledger, *, rank: int = 0, expiry: str = "hold", costly_fence: bool = False
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.ledger = ledger
        self.expiry = expiry
        self.costly_fence = costly_fence
        self.transfers: dict[TransferId, Transfer] = {}
        self.high = 0
        self.counter = 0
        self.stale = 0
        self.ended: Counter[str] = Counter()
        self._fencing: dict[int, int] = {}  # peer epoch -> generation a fence is running for
        self._granted: dict[int, int] = {}  # peer epoch -> newest generation it was ever granted

    # ------------------------------------------------------------ in

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
        """Pages, a row and a new id for one transfer, or None when the pool has no room for it now."""
        tid = TransferId(self.epoch, self.high + 1)
        if self.ledger.own(tid, pages) is None:
            return None
        self.high += 1
        self.transfers[tid] = Transfer(tid, room, pairing, tokens, prefix, dict(ranks))
        return tid

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Heard):
            return self._heard(event)
        if isinstance(event, PeerLost | Revoked | NotRevoked):
            return PEER_TABLE[type(event)](self, event)
        tid = event.about if isinstance(event, Fired) else event.tid
        transfer = self.transfers.get(tid) if isinstance(tid, TransferId) else None
        if transfer is None:
            return []
        key = event.timer if isinstance(event, Fired) else type(event)
        row = TABLE.get((transfer.state, key))
        return [] if row is None else row(self, transfer, event)

    def _heard(self, event: Heard) -> list[Action]:
        message = event.message
        leg = getattr(message, "leg", None)
        if isinstance(message, Refused) and message.reason == "wrong epoch" and message.leg.p_epoch != event.speaker:
            return self._wrong_epoch(message)
        if leg is None or leg.p_epoch != event.speaker or leg.d_rank != self.rank:
            self.stale += 1
            return []
        # ACK of anything, also of closed ids and dead epochs: the other side must be able to stop repeating.
        answer: list[Action] = [Send(leg.p_epoch, Ack(leg))] if isinstance(message, Done | Failed) else []
        transfer = self.transfers.get(leg.tid)
        peer = None if transfer is None else transfer.published.get(leg.p_rank)
        if transfer is None or peer is None or peer.offer.leg != leg:
            self.stale += 1
            return answer
        row = TABLE.get((transfer.state, type(message)))
        if row is None:
            self.stale += 1
            return answer
        return answer + row(self, transfer, message)

    # ------------------------------------------------------------ the offer

    def _publish(self, transfer: Transfer, event: Publish) -> list[Action]:
        if event.rank in transfer.published:
            return []
        epoch = transfer.ranks[event.rank]
        leg = Leg(transfer.tid, self.rank, event.rank, epoch)
        pages = self.ledger.pages(transfer.tid)
        offer = Offer(
            leg=leg,
            room=transfer.room,
            pairing=transfer.pairing,
            grant=Grant(event.region, event.generation, pages),
            tokens=transfer.tokens,
            prefix=transfer.prefix,
            remaining_ms=event.remaining_ms,
        )
        # Published first, then sent: a send that fails may still have been seen (guard H4).
        self.ledger.lend(LeaseKey.write(leg), event.generation, pages)
        transfer.published[event.rank] = Published(offer)
        self._granted[epoch] = max(event.generation, self._granted.get(epoch, 0))
        actions: list[Action] = [
            Send(epoch, offer),
            Arm(Timer.REPEAT, transfer.tid),
            Arm(Timer.DEADLINE, transfer.tid, delay_ms=event.remaining_ms),
        ]
        if transfer.published.keys() == transfer.ranks.keys():
            transfer.state = State.OFFERED
            actions += self._land_if_complete(transfer)
        return actions

    def _repeat_offer(self, transfer: Transfer, event: Fired) -> list[Action]:
        waiting = [p.offer for p in transfer.published.values() if not p.accepted and p.done is None and not p.proven]
        if not waiting:
            return []
        return [Send(offer.leg.p_epoch, offer) for offer in waiting] + self._again(transfer)

    def _accept(self, transfer: Transfer, message: Accept) -> list[Action]:
        transfer.published[message.leg.p_rank].accepted = True
        return []

    def _refused(self, transfer: Transfer, message: Refused) -> list[Action]:
        peer = transfer.published[message.leg.p_rank]
        if peer.done is not None:
            return []
        if message.reason == "ended":
            # The bound epoch stored a tombstone before it said so: it posted nothing and never will.
            self._prove(transfer, message.leg, ProofKind.NEVER_STARTED)
        return self._hold(transfer, f"prefill refused the transfer: {message.reason}")

    def _wrong_epoch(self, message: Refused) -> list[Action]:
        """A successor of the bound epoch speaks. It knows nothing of its predecessor's posts: hold, prove nothing."""
        transfer = self.transfers.get(message.leg.tid)
        peer = None if transfer is None else transfer.published.get(message.leg.p_rank)
        if transfer is None or peer is None or peer.offer.leg != message.leg or peer.done is not None:
            self.stale += 1
            return []
        if transfer.state not in (State.RESERVED, State.OFFERED):
            return []
        return self._hold(transfer, "the prefill engine restarted")

    # ------------------------------------------------------------ landing

    def _note_done(self, transfer: Transfer, message: Done) -> list[Action]:
        peer = transfer.published[message.leg.p_rank]
        if peer.done is not None:
            return []
        peer.done = message
        self._prove(transfer, message.leg, ProofKind.COMPLETED)
        return self._land_if_complete(transfer)

    def _land_if_complete(self, transfer: Transfer) -> list[Action]:
        if transfer.state is not State.OFFERED or any(p.done is None for p in transfer.published.values()):
            return []
        transfer.state = State.LANDED
        pages = len(self.ledger.pages(transfer.tid))
        for peer in transfer.published.values():
            done = peer.done
            assert done is not None
            if done.pages != pages or done.tokens != transfer.tokens:
                # The plan is the sender's, checked against what was offered (guard L5).
                return self._hold(
                    transfer,
                    f"prefill filled {done.tokens} tokens in {done.pages} pages; "
                    f"{transfer.tokens} in {pages} were offered",
                )
        speaker = transfer.published[DESIGNATED_RANK].done
        assert speaker is not None
        if speaker.result is None:
            return self._hold(transfer, "prefill finished without a first token")
        if speaker.digest is not None:
            return [Verify(transfer.tid, speaker.digest)]
        return self._commit(transfer)

    def _verified(self, transfer: Transfer, event: Verified) -> list[Action]:
        if event.matches:
            return self._commit(transfer)
        # Somebody we cannot name wrote here: proofs of our own ranks say nothing about that (guard H15).
        transfer.state = State.QUARANTINE
        transfer.cause = "digest mismatch: the pages were changed by a foreign writer"
        transfer.accused = {epoch: self._granted.get(epoch, 0) for epoch in event.peers}
        self.ledger.lend(LeaseKey.foreign(transfer.tid))
        self.ledger.end(transfer.tid)
        self.ledger.retain(transfer.tid)
        return [Lost(transfer.tid, transfer.cause)]

    def _commit(self, transfer: Transfer) -> list[Action]:
        speaker = transfer.published[DESIGNATED_RANK].done
        assert speaker is not None and speaker.result is not None
        assert not any(key.kind.value == "write" for key in self.ledger.leases(transfer.tid))
        transfer.state = State.COMMITTED
        return [Committed(transfer.tid, speaker.result)]

    def _finish(self, transfer: Transfer, event: End) -> list[Action]:
        """A committed request is over: nothing is lent to a peer any more, so this is the ledger's alone."""
        self.ledger.end(transfer.tid)
        return self._closed(transfer, event.reason)

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
            Send(peer.offer.leg.p_epoch, Abort(peer.offer.leg, reason))
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
        transfer.published[message.leg.p_rank].done = message
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
        transfer.published[message.leg.p_rank].busy = True
        return []

    def _tainted(self, transfer: Transfer, message: Tainted) -> list[Action]:
        peer = transfer.published[message.leg.p_rank]
        if peer.proven or peer.tainted:
            return []  # repeats start no second fence (guard H17)
        peer.tainted = True
        return self._revoke_all([peer])

    def _prove(self, transfer: Transfer, leg: Leg, kind: ProofKind) -> None:
        peer = transfer.published[leg.p_rank]
        key = LeaseKey.write(leg)
        if not peer.proven and self.ledger.close(key, Proof.spoken(kind, key)):
            peer.proven = True

    def _prove_and_close(self, transfer: Transfer, leg: Leg, kind: ProofKind) -> list[Action]:
        self._prove(transfer, leg, kind)
        return self._close_if_proven(transfer)

    def _all_proven(self, transfer: Transfer) -> bool:
        return all(peer.proven for peer in transfer.published.values())

    def _close_if_proven(self, transfer: Transfer) -> list[Action]:
        if transfer.state is State.HOLDING and self._all_proven(transfer):
            return self._closed(transfer, transfer.cause or "given up")
        return []

    def _closed(self, transfer: Transfer, reason: str) -> list[Action]:
        del self.transfers[transfer.tid]
        self.ended["committed" if transfer.state is State.COMMITTED else transfer.state.value] += 1
        return [Closed(transfer.tid)]

    # ------------------------------------------------------------ fences

    def _hold_expired(self, transfer: Transfer, event: Fired) -> list[Action]:
        """Time is not a proof: it starts a fence (guard H11)."""
        unproven = [peer for peer in transfer.published.values() if not peer.proven]
        if self.expiry == "release":
            for peer in unproven:
                waiver = Waiver(f"--on-hold-expiry=release: {transfer.cause}")
                peer.proven = self.ledger.waive(LeaseKey.write(peer.offer.leg), waiver)
            return self._close_if_proven(transfer)
        if self.costly_fence and any(peer.busy and peer.deferrals < BUSY_DEFERRALS for peer in unproven):
            for peer in unproven:
                peer.busy, peer.deferrals = False, peer.deferrals + 1
            return [Arm(Timer.HOLD, transfer.tid, event.attempt + 1)]
        self.ledger.retain(transfer.tid)
        return self._revoke_all(unproven)

    def _refence(self, transfer: Transfer, event: Fired) -> list[Action]:
        return self._revoke_all([p for p in transfer.published.values() if not p.proven])

    def _revoke_all(self, peers: list[Published]) -> list[Action]:
        actions: list[Action] = []
        for peer in peers:
            actions += self._revoke(peer.offer.leg.p_epoch, peer.offer.grant.generation, dead=peer.lost)
        return actions

    def _revoke(self, epoch: int, generation: int, *, dead: bool) -> list[Action]:
        if self._fencing.get(epoch, -1) >= generation:
            return []
        self._fencing[epoch] = generation
        return [Revoke(epoch, generation, dead)]

    def _peer_lost(self, event: PeerLost) -> list[Action]:
        actions: list[Action] = []
        for transfer in list(self.transfers.values()):
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
        if proof.generation is None or self._fencing.get(proof.epoch, -1) <= proof.generation:
            self._fencing.pop(proof.epoch, None)
        actions: list[Action] = []
        for transfer in list(self.transfers.values()):
            for peer in transfer.published.values():
                key = LeaseKey.write(peer.offer.leg)
                if peer.proven or not proof.covers(key, peer.offer.grant.generation):
                    continue
                if transfer.state in (State.RESERVED, State.OFFERED):
                    actions += self._hold(transfer, "the prefill engine's access was revoked")
                peer.proven = self.ledger.close(key, proof)
            actions += self._close_if_proven(transfer)
            if transfer.state is State.QUARANTINE:
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
        if self._fencing.get(event.epoch) == event.generation:
            del self._fencing[event.epoch]
        actions: list[Action] = []
        for transfer in self.transfers.values():
            if transfer.state is State.HOLDING and any(
                not p.proven and p.offer.leg.p_epoch == event.epoch for p in transfer.published.values()
            ):
                self.ledger.retain(transfer.tid)
                transfer.repeats += 1
                actions.append(Arm(Timer.REFENCE, transfer.tid, transfer.repeats))
        return actions

    # ------------------------------------------------------------ the closed set

    def closed_set(self) -> tuple[int, int, list[int]]:
        """(counter, high, open seqs): every seq up to `high` that is not listed is closed for ever (guard N5)."""
        self.counter += 1
        listed = [t.tid.seq for t in self.transfers.values() if t.state is not State.COMMITTED]
        return self.counter, self.high, sorted(listed)


Row = Callable[..., list[Action]]

# (state, message type | event type | timer) -> what happens. No row: nothing changes.
TABLE: dict[tuple[State, object], Row] = {
    (State.RESERVED, Publish): Lender._publish,
    (State.RESERVED, Accept): Lender._accept,
    (State.RESERVED, Done): Lender._note_done,
    (State.RESERVED, Failed): Lender._failed,
    (State.RESERVED, Refused): Lender._refused,
    (State.RESERVED, End): Lender._end,
    (State.RESERVED, Timer.REPEAT): Lender._repeat_offer,
    (State.RESERVED, Timer.DEADLINE): Lender._deadline,
    (State.OFFERED, Accept): Lender._accept,
    (State.OFFERED, Done): Lender._note_done,
    (State.OFFERED, Failed): Lender._failed,
    (State.OFFERED, Refused): Lender._refused,
    (State.OFFERED, End): Lender._end,
    (State.OFFERED, Timer.REPEAT): Lender._repeat_offer,
    (State.OFFERED, Timer.DEADLINE): Lender._deadline,
    (State.LANDED, Verified): Lender._verified,
    (State.LANDED, Failed): Lender._failed,
    (State.LANDED, End): Lender._end,
    (State.LANDED, Timer.DEADLINE): Lender._deadline,
    (State.COMMITTED, End): Lender._finish,
    (State.HOLDING, Done): Lender._done_in_holding,
    (State.HOLDING, Refused): Lender._refused_in_holding,
    (State.HOLDING, Drained): Lender._drained,
    (State.HOLDING, NeverStarted): Lender._never_started,
    (State.HOLDING, Busy): Lender._busy,
    (State.HOLDING, Tainted): Lender._tainted,
    (State.HOLDING, Timer.REPEAT): Lender._repeat_abort,
    (State.HOLDING, Timer.HOLD): Lender._hold_expired,
    (State.HOLDING, Timer.REFENCE): Lender._refence,
}
PEER_TABLE: dict[type, Row] = {
    PeerLost: Lender._peer_lost,
    Revoked: Lender._revoked,
    NotRevoked: Lender._not_revoked,
}
