"""A transfer as seen by the rank whose pages are touched (protocol, section 3).

`Lender` holds every transfer of one decode rank. It does not know what time it is, what a socket is, or which
transport moves the bytes. Read `TABLE` first: a row is (state, event) -> what happens. What has no row changes
nothing; a DONE or FAILED gets its ACK whatever the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quiesce.core.holding import Holdings
from quiesce.core.lending import (
    REFUSED,
    End,
    Event,
    NotRevoked,
    PeerLost,
    Publish,
    Published,
    Revoked,
    State,
    Transfer,
    Verified,
)
from quiesce.core.machine import Action, Arm, Committed, Fired, Heard, Lost, Send, Timer, Verify
from quiesce.core.messages import (
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
from quiesce.core.proofs import Borrowing, LeaseKey, ProofKind

__all__ = [
    "DESIGNATED_RANK",
    "PEER_TABLE",
    "TABLE",
    "End",
    "Event",
    "Lender",
    "NotRevoked",
    "PeerLost",
    "Publish",
    "Published",
    "Revoked",
    "State",
    "Transfer",
    "Verified",
]

DESIGNATED_RANK = 0  # the one rank whose DONE carries the result (guard L6)


class Lender(Holdings):
    """The way to a commit. What is given up, proven and fenced is in `Holdings`."""

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
        tid = self.ids.next
        if self.ledger.own(tid, pages) is None:
            return None
        self.ids.mint()
        self._add(Transfer(tid, room, pairing, tokens, prefix, dict(ranks)))
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
        return self._hold(transfer, f"{REFUSED}{message.reason}")

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
        # A fence that already runs for a peer may have taken effect before the foreign write: it owes a newer one.
        transfer.accused = {
            epoch: max([self._granted.get(epoch, 0), *(g + 1 for (e, _), g in self._fencing.items() if e == epoch)])
            for epoch in event.peers
        }
        self._quarantined[transfer.tid] = transfer
        self.ledger.lend(LeaseKey.foreign(transfer.tid))
        self.ledger.end(transfer.tid)
        self.ledger.retain(transfer.tid)
        return [Lost(transfer.tid, transfer.cause)]

    def _commit(self, transfer: Transfer) -> list[Action]:
        speaker = transfer.published[DESIGNATED_RANK].done
        assert speaker is not None and speaker.result is not None
        assert not any(key.kind is Borrowing.WRITE for key in self.ledger.leases(transfer.tid))
        transfer.state = State.COMMITTED
        return [Committed(transfer.tid, speaker.result)]


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
