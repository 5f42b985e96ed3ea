"""Pull, as seen by the prefill rank whose source pages are read (protocol, 5a).

COMPUTING -> LENT -> CLOSED, or -> HOLDING -> CLOSED. It mints nothing: ids are decode's. A page that was lent comes
back by a proof about the reader, as in push; nothing that the reader checks for itself entitles this side to free.
"""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core.closed_set import ClosedSets
from quiesce.core.holding import Holdings
from quiesce.core.ledger import Ledger
from quiesce.core.lending import End, NotRevoked, PeerLost, Published, Revoked, State, Transfer
from quiesce.core.machine import Action, Arm, Fired, Heard, Opened, Send, Timer
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Check,
    Done,
    Drained,
    Failed,
    Grant,
    Leg,
    Offer,
    Ping,
    Refused,
    Request,
    Standing,
    Tainted,
    TransferId,
)
from quiesce.core.proofs import LeaseKey, ProofKind
from quiesce.core.pulling import COMPUTING, LENT, Computed, ReaderUp

__all__ = ["PEER_TABLE", "TABLE", "Event", "PullLender"]

Event = Heard | Fired | End | Computed | ReaderUp | PeerLost | Revoked | NotRevoked


class PullLender(Holdings, ClosedSets):
    """`ledger` owns the source pages. `lease_ms`: a reader of which no PING was heard for so long is asked to stop.
    One decode rank reads a transfer; a request of a second is dropped."""

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        *,
        rank: int = 0,
        expiry: str = "hold",
        costly_fence: bool = False,
        page_fence: bool = False,
        lease_ms: int = 10_000,
        max_records: int = 4096,
    ) -> None:
        Holdings.__init__(
            self, epoch, ledger, rank=rank, expiry=expiry, costly_fence=costly_fence, page_fence=page_fence
        )
        ClosedSets.__init__(self)
        self.lease_ms = lease_ms
        self.max_records = max_records
        self.in_force: dict[Leg, int] = {}  # generation under which it is lent now; a leg is lent once, ever
        self.tombstones: set[Leg] = set()  # ended; a late REQUEST must find it (guard N5)

    def _key(self, leg: Leg) -> LeaseKey:
        return LeaseKey.source(leg)

    def _before_close(self, peer: Published) -> None:
        """The grant ends first, then the pages may be reused (guard L10)."""
        self.in_force.pop(peer.offer.leg, None)

    def _leg(self, transfer: Transfer) -> Leg:
        (d_rank,) = transfer.ranks
        return Leg(transfer.tid, d_rank, self.rank, self.epoch)

    # ------------------------------------------------------------ in

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Heard):
            return self._heard(event)
        if isinstance(event, ReaderUp):
            return [] if self._up(event.epoch) else self._drop()
        if isinstance(event, PeerLost | Revoked | NotRevoked):
            return PEER_TABLE[type(event)](self, event)
        tid = event.about if isinstance(event, Fired) else event.tid
        transfer = self.transfers.get(tid) if isinstance(tid, TransferId) else None
        row = transfer and TABLE.get((transfer.state, event.timer if isinstance(event, Fired) else type(event)))
        return row(self, transfer, event) if row else []

    def _heard(self, event: Heard) -> list[Action]:
        message, speaker = event.message, event.speaker
        if isinstance(message, Ping):
            return self._closed_set(message) if message.epoch == speaker else self._drop()
        leg = message.leg
        if leg.tid.epoch != speaker or leg.p_rank != self.rank:
            return self._drop()
        if leg.p_epoch != self.epoch:
            ours = isinstance(message, Request | Check)
            return [Send(speaker, Refused(leg, "wrong epoch"))] if ours else self._drop()
        if isinstance(message, Check):  # looked at now: after the question, and so after the last read (guard L10)
            return [Send(speaker, Standing(leg, message.nonce, self.in_force.get(leg)))]
        # ACK of any FAILED, also of closed and unknown ids: the reader must be able to stop repeating.
        answer: list[Action] = [Send(speaker, Ack(leg))] if isinstance(message, Failed) else []
        transfer = self.transfers.get(leg.tid)
        if transfer is None:
            return answer or self._unknown(message)
        row = TABLE.get((transfer.state, type(message))) if leg.d_rank in transfer.ranks else None
        return answer + (self._drop() if row is None else row(self, transfer, message))

    # ------------------------------------------------------------ the request

    def _unknown(self, message: object) -> list[Action]:
        if not isinstance(message, Request):
            return self._drop()
        leg, to = message.leg, message.leg.tid.epoch
        if to not in self.lenders:
            return [Send(to, Refused(leg, "unknown epoch"))]
        if self._is_closed(leg):
            return [Send(to, Refused(leg, "closed"))]
        if leg in self.tombstones:
            return [Send(to, Refused(leg, "ended"))]
        if len(self.transfers) + len(self.tombstones) >= self.max_records:
            return [Send(to, Refused(leg, "full"))]  # evict nothing (guard D7)
        ahead = len(self.transfers)
        ranks = {leg.d_rank: to}
        self._add(Transfer(leg.tid, message.room, message.pairing, message.tokens, message.prefix, ranks))
        deadline = Arm(Timer.DEADLINE, leg.tid, delay_ms=message.remaining_ms)
        return [Send(to, Accept(leg, ahead)), deadline, Opened(leg)]

    def _request_again(self, transfer: Transfer, message: Request) -> list[Action]:
        """A known id: the current answer, never opened again."""
        leg, to = message.leg, message.leg.tid.epoch
        if transfer.state is COMPUTING:
            return [Send(to, Accept(leg, 0))]
        if transfer.state is LENT:
            return [Send(to, transfer.published[leg.d_rank].offer)]
        return self._aborts(transfer)

    def _lend(self, transfer: Transfer, event: Computed) -> list[Action]:
        leg = self._leg(transfer)
        if event.pairing != transfer.pairing:  # nothing is lent about another prompt (guard L9)
            return self._call_off(transfer, f"pairing: room {transfer.room} was asked for with another prompt")
        pages = self.ledger.pages(transfer.tid)
        offer = Offer(
            leg=leg,
            room=transfer.room,
            pairing=event.pairing,
            grant=Grant(event.region, event.generation, pages),
            tokens=event.tokens,
            prefix=transfer.prefix,
            remaining_ms=event.remaining_ms,
            result=event.result,
        )
        # LENT is recorded first, then said (guard H4).
        self.ledger.lend(LeaseKey.source(leg), event.generation, pages)
        self.in_force[leg] = event.generation
        transfer.published[leg.d_rank] = Published(offer)
        transfer.state = LENT
        return [Send(leg.tid.epoch, offer), Arm(Timer.REPEAT, leg.tid), self._lease(leg.tid)]

    def _repeat_offer(self, transfer: Transfer, event: Fired) -> list[Action]:
        offers = [peer.offer for peer in transfer.published.values()]
        return [Send(offer.leg.tid.epoch, offer) for offer in offers] + self._again(transfer)

    # ------------------------------------------------------------ giving up

    def _ended_early(self, transfer: Transfer, event: End) -> list[Action]:
        return self._call_off(transfer, event.reason)

    def _too_late(self, transfer: Transfer, event: Fired) -> list[Action]:
        return self._call_off(transfer, "the transfer's deadline passed")

    def _call_off(self, transfer: Transfer, cause: str) -> list[Action]:
        """Nothing was lent or is held. The reader hears why; should that get lost, its REQUEST is REFUSED."""
        return [*self._hold(transfer, cause), Send(transfer.tid.epoch, Abort(self._leg(transfer), cause))]

    def _silent(self, transfer: Transfer, event: Fired) -> list[Action]:
        """Time is not a proof: asked to stop first, then fenced (guard H11)."""
        return self._hold(transfer, "decode was not heard of while it read")

    # ------------------------------------------------------------ the reader's word

    def _read(self, transfer: Transfer, message: Done) -> list[Action]:
        """All placed, checked and committed: the one good end."""
        self._prove(transfer, message.leg, ProofKind.COMPLETED)
        transfer.state = State.COMMITTED
        self.ledger.end(transfer.tid)
        return self._closed(transfer, "done")

    def _given_up(self, transfer: Transfer, message: Drained) -> list[Action]:
        if transfer.published:
            self._prove(transfer, message.leg, ProofKind.DRAINED)
        return self._hold(transfer, "decode gave it up")

    def _closed_set(self, ping: Ping) -> list[Action]:
        """Not listed is DRAINED. What is listed as being read, and only that, has its lease renewed (guard N10)."""
        if not self._take(ping):
            return self._drop()
        actions: list[Action] = []
        for transfer in self._of(ping.epoch):
            leg = self._leg(transfer)
            if (leg.tid.epoch, leg.d_rank) != (ping.epoch, ping.rank):
                continue
            if self._is_closed(leg):
                actions += TABLE[transfer.state, Drained](self, transfer, Drained(leg))
            elif transfer.state is LENT and leg.tid.seq in ping.reading:
                actions.append(self._lease(leg.tid))
        self.tombstones = {leg for leg in self.tombstones if not self._is_closed(leg)}
        return actions

    def _lease(self, tid: TransferId) -> Arm:
        return Arm(Timer.LEASE, tid, delay_ms=self.lease_ms)  # DEADLINE was armed once: no PING moves it

    def _reader_lost(self, event: PeerLost) -> list[Action]:
        """Its tombstones go with it: an epoch that is gone is never heard again."""
        self._is_gone(event.epoch)
        self.tombstones = {leg for leg in self.tombstones if leg.tid.epoch != event.epoch}
        return self._peer_lost(event)

    def _closed(self, transfer: Transfer, reason: str) -> list[Action]:
        leg = self._leg(transfer)
        if leg.tid.epoch in self.lenders and not self._is_closed(leg):
            self.tombstones.add(leg)
        return super()._closed(transfer, reason)


Row = Callable[..., list[Action]]

# (state, message type | event type | timer) -> what happens. No row: nothing changes.
TABLE: dict[tuple[State, object], Row] = {
    (COMPUTING, Request): PullLender._request_again,
    (COMPUTING, Computed): PullLender._lend,
    (COMPUTING, Drained): PullLender._given_up,
    (COMPUTING, End): PullLender._ended_early,
    (COMPUTING, Timer.DEADLINE): PullLender._too_late,
    (LENT, Request): PullLender._request_again,
    (LENT, Done): PullLender._read,
    (LENT, Drained): PullLender._given_up,
    (LENT, Failed): PullLender._failed,
    (LENT, End): PullLender._end,
    (LENT, Timer.REPEAT): PullLender._repeat_offer,
    (LENT, Timer.DEADLINE): PullLender._deadline,
    (LENT, Timer.LEASE): PullLender._silent,
    (State.HOLDING, Request): PullLender._request_again,
    (State.HOLDING, Done): PullLender._done_in_holding,
    (State.HOLDING, Drained): PullLender._drained,
    (State.HOLDING, Busy): PullLender._busy,
    (State.HOLDING, Tainted): PullLender._tainted,
    (State.HOLDING, Timer.REPEAT): PullLender._repeat_abort,
    (State.HOLDING, Timer.HOLD): PullLender._hold_expired,
    (State.HOLDING, Timer.REFENCE): PullLender._refence,
}
PEER_TABLE: dict[type, Row] = {
    PeerLost: PullLender._reader_lost,
    Revoked: PullLender._revoked,
    NotRevoked: PullLender._not_revoked,
}
