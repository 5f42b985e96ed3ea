"""Pull, as seen by the decode rank that reads (protocol, 5a).

ASKED -> READING -> CHECK -> COMMITTED, or from any of the first three -> GIVEN UP, which ends at count zero without
taint or by a fence of our own. The destination pages are lent to our own reads, so they come back by the same ledger
and the same proofs as in push. Read `TABLE` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from quiesce.core.borrowing import DrainSaid, PostEnded
from quiesce.core.closed_set import Ids
from quiesce.core.holding import Holdings
from quiesce.core.ledger import Ledger
from quiesce.core.lender import DESIGNATED_RANK
from quiesce.core.lending import REFUSED, End, NotRevoked, PeerLost, Published, Revoked, State, Transfer
from quiesce.core.machine import Action, Arm, CheckGrant, Committed, Fired, Heard, Post, Send, Timer, TryDrain
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    Leg,
    Offer,
    Refused,
    Request,
    Tainted,
    TransferId,
)
from quiesce.core.posting import Chunk, Outcome, Posting
from quiesce.core.proofs import LeaseKey, ProofKind
from quiesce.core.pulling import ASKED, CHECK, GIVEN_UP, READING, Ask, Asked, Checked, Reading

__all__ = ["PEER_TABLE", "TABLE", "Event", "PullReader"]

Event = Heard | Fired | End | Ask | Checked | PostEnded | DrainSaid | PeerLost | Revoked | NotRevoked
UNDER_WAY = (ASKED, READING, CHECK)


class PullReader(Holdings, Posting[Reading]):
    """`batch`: pages of one read (guard L8). `ids`: those of the process, which other machines use too."""

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        *,
        rank: int = 0,
        window: int = 4,
        batch: int = 256,
        expiry: str = "hold",
        page_fence: bool = False,
        ids: Ids | None = None,
    ) -> None:
        Holdings.__init__(self, epoch, ledger, rank=rank, expiry=expiry, page_fence=page_fence, ids=ids)
        Posting.__init__(self)
        self.window = window
        self.batch = batch

    @staticmethod
    def _readings(transfer: Transfer) -> dict[int, Reading]:
        return cast("dict[int, Reading]", transfer.published)

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
        if self.ledger.own(self.ids.next, pages) is None:
            return None
        tid = self.ids.mint()
        self._add(Asked(tid, room, pairing, tokens, prefix, dict(ranks)))
        return tid

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Heard):
            return self._heard(event)
        if isinstance(event, PeerLost | Revoked | NotRevoked):
            return PEER_TABLE[type(event)](self, event)
        if isinstance(event, PostEnded | DrainSaid):
            return self._own_post(event)
        about = (
            event.about if isinstance(event, Fired) else event.leg.tid if isinstance(event, Checked) else event.tid
        )
        transfer = self.transfers.get(about) if isinstance(about, TransferId) else None
        row = transfer and TABLE.get((transfer.state, event.timer if isinstance(event, Fired) else type(event)))
        return row(self, transfer, event) if row else []

    def _heard(self, event: Heard) -> list[Action]:
        message, speaker = event.message, event.speaker
        leg = getattr(message, "leg", None)
        if leg is None or leg.tid.epoch != self.epoch or leg.d_rank != self.rank:
            return self._drop()
        transfer = self.transfers.get(leg.tid)
        restarted = isinstance(message, Refused) and message.reason == "wrong epoch" and leg.p_epoch != speaker
        if not restarted and leg.p_epoch != speaker:
            return self._drop()
        if transfer is None:
            # Nothing of an id that we do not know was ever left unfinished: DRAINED, and never opened again.
            ended = isinstance(message, Offer | Abort) and leg.tid.seq <= self.ids.high
            return [Send(speaker, Drained(leg))] if ended else self._drop()
        if transfer.ranks.get(leg.p_rank) != leg.p_epoch:
            return self._drop()
        if restarted:
            return self._hold(transfer, "the prefill engine restarted") if transfer.state in UNDER_WAY else []
        row = TABLE.get((transfer.state, type(message)))
        return self._drop() if row is None else row(self, transfer, message)

    # ------------------------------------------------------------ asking and reading

    def _ask(self, transfer: Asked, event: Ask) -> list[Action]:
        for rank, epoch in transfer.ranks.items():
            leg = Leg(transfer.tid, self.rank, rank, epoch)
            transfer.requests[rank] = Request(
                leg, transfer.room, transfer.pairing, transfer.tokens, transfer.prefix, event.remaining_ms
            )
        deadline = Arm(Timer.DEADLINE, transfer.tid, delay_ms=event.remaining_ms)
        return [*self._requests(transfer), Arm(Timer.REPEAT, transfer.tid), deadline]

    def _requests(self, transfer: Asked) -> list[Action]:
        waiting = [request for rank, request in transfer.requests.items() if rank not in transfer.published]
        return [Send(request.leg.p_epoch, request) for request in waiting]

    def _repeat_request(self, transfer: Asked, event: Fired) -> list[Action]:
        return self._requests(transfer) + self._again(transfer)

    def _accepted(self, transfer: Asked, message: Accept) -> list[Action]:
        return []  # queued there; the REQUEST is repeated all the same, for the OFFER may get lost

    def _refused(self, transfer: Asked, message: Refused) -> list[Action]:
        if message.leg.p_rank in transfer.published:
            return []  # the late answer to a REQUEST that was repeated
        return self._hold(transfer, f"{REFUSED}{message.reason}")

    def _offered(self, transfer: Asked, message: Offer) -> list[Action]:
        leg, grant = message.leg, message.grant
        if leg.p_rank in transfer.published or leg.p_rank not in transfer.requests:
            return []
        pages = self.ledger.pages(transfer.tid)
        theirs = (message.pairing, message.tokens, message.prefix, len(grant.pages))
        if theirs != (transfer.pairing, transfer.tokens, transfer.prefix, len(pages)):
            # The plan is the sender's, checked against what was asked for (guards L5, L9).
            return self._hold(transfer, "prefill offered something else than it was asked for")
        self.ledger.lend(LeaseKey.write(leg), grant.generation, pages)
        starts = range(0, len(pages), self.batch)
        chunks = deque(Chunk(grant.pages[first : first + self.batch], first) for first in starts)
        reading = transfer.published[leg.p_rank] = Reading(message, queue=chunks)
        if transfer.published.keys() == transfer.ranks.keys():
            transfer.state = READING
        return self._pump(reading)

    def _post(self, reading: Reading, chunk: Chunk, number: int) -> Post:
        offer = reading.offer
        pages = self.ledger.pages(offer.leg.tid)
        own = pages[chunk.first : chunk.first + len(chunk.source)]
        return Post(offer.leg, number, source=chunk.source, destination=own, grant=offer.grant)

    def _own_post(self, event: PostEnded | DrainSaid) -> list[Action]:
        transfer = self.transfers.get(event.leg.tid)
        reading = None if transfer is None else self._readings(transfer).get(event.leg.p_rank)
        if transfer is None or reading is None or reading.offer.leg != event.leg:
            return self._drop()
        if isinstance(event, DrainSaid):
            return self._drain_said(transfer, reading, event)
        if not self._count_down(reading, event.number, event.outcome):
            return self._drop()
        if transfer.state is GIVEN_UP:
            return self._at_zero(transfer, reading) + self._close_if_proven(transfer)
        if event.outcome is not Outcome.PLACED:
            return self._hold(transfer, f"a read from prefill ended {event.outcome.value}")
        return self._pump(reading) + self._check_if_landed(transfer, reading)

    # ------------------------------------------------------------ the check, and the commit

    def _check_if_landed(self, transfer: Transfer, reading: Reading) -> list[Action]:
        """The check begins after the last PLACED, of all ranks (guard L10)."""
        if reading.count or reading.queue:
            return []
        self._prove(transfer, reading.offer.leg, ProofKind.COMPLETED)
        if transfer.state is not READING or not self._all_proven(transfer):
            return []
        transfer.state = CHECK
        return [CheckGrant(peer.offer.leg, peer.offer.grant) for peer in transfer.published.values()]

    def _checked(self, transfer: Transfer, event: Checked) -> list[Action]:
        reading = self._readings(transfer).get(event.leg.p_rank)
        if reading is None or reading.offer.leg != event.leg:
            return self._drop()
        if (event.epoch, event.generation) != (event.leg.p_epoch, reading.offer.grant.generation):
            return self._hold(transfer, "the source pages were taken back before the check after landing")
        reading.checked = True
        if not all(reading.checked for reading in self._readings(transfer).values()):
            return []
        result = transfer.published[DESIGNATED_RANK].offer.result
        if result is None:
            return self._hold(transfer, "prefill offered its pages without a first token")
        transfer.state = State.COMMITTED
        said = [send for peer in transfer.published.values() for send in self._done(transfer, peer.offer)]
        return [Committed(transfer.tid, result), *said]

    def _done(self, transfer: Transfer, offer: Offer) -> list[Action]:
        return [Send(offer.leg.p_epoch, Done(offer.leg, len(offer.grant.pages), offer.tokens))]

    # ------------------------------------------------------------ giving up

    def _hold(self, transfer: Transfer, cause: str) -> list[Action]:
        """Stop first. A rank of which nothing is under way is told DRAINED, every other one FAILED (guard N10)."""
        readings = list(self._readings(transfer).values())
        for reading in readings:
            self._stop(reading)
            if not reading.count and not reading.tainted:
                self._prove(transfer, reading.offer.leg, ProofKind.DRAINED)
        owing = [reading.offer.leg for reading in readings if not reading.proven]
        legs = [request.leg for request in cast(Asked, transfer).requests.values()]
        actions = super()._hold(transfer, cause)
        actions += [Send(leg.p_epoch, Drained(leg)) for leg in legs if leg not in owing]
        return actions + [action for reading in readings for action in self._at_zero(transfer, reading)]

    def _aborts(self, transfer: Transfer) -> list[Action]:
        """What push says by ABORT: that it was given up. Until it is known over there."""
        return [
            Send(reading.offer.leg.p_epoch, Failed(reading.offer.leg, transfer.cause or "given up"))
            for reading in self._readings(transfer).values()
            if not (reading.proven or reading.acked or reading.asked)
        ]

    def _repeat_failed(self, transfer: Transfer, event: Fired) -> list[Action]:
        said = self._aborts(transfer)
        return said + self._again(transfer) if said else []

    def _acknowledged(self, transfer: Transfer, message: Ack) -> list[Action]:
        reading = self._readings(transfer).get(message.leg.p_rank)
        if reading is not None:
            reading.acked = True
        return []

    def _at_zero(self, transfer: Transfer, reading: Reading) -> list[Action]:
        """Whoever brings the count to zero answers (guard A3). A taint asks for a drain and for our own fence."""
        if reading.count or reading.proven:
            return []
        leg = reading.offer.leg
        if reading.tainted:
            said: list[Action] = [Send(leg.p_epoch, Tainted(leg))] if reading.asked else []
            return [*said, TryDrain(leg), *self._revoke_all([reading])]
        self._prove(transfer, leg, ProofKind.DRAINED)
        return [Send(leg.p_epoch, Drained(leg))] if reading.asked else []

    def _drain_said(self, transfer: Transfer, reading: Reading, event: DrainSaid) -> list[Action]:
        """Only a drain proven on the connection that carried the lost read ends a taint (guard A15)."""
        if not event.proven or reading.count or transfer.state is not GIVEN_UP:
            return []
        reading.tainted = False
        return self._at_zero(transfer, reading) + self._close_if_proven(transfer)

    # ------------------------------------------------------------ ABORT, and OFFERs that come too late

    def _aborted(self, transfer: Transfer, message: Abort) -> list[Action]:
        reading = self._readings(transfer).get(message.leg.p_rank)
        if reading is None:
            return self._hold(transfer, message.reason)
        reading.asked = True
        busy: list[Action] = [Send(message.leg.p_epoch, Busy(message.leg, reading.count))] if reading.count else []
        return self._hold(transfer, message.reason) + busy

    def _aborted_again(self, transfer: Transfer, message: Abort) -> list[Action]:
        leg = message.leg
        reading = self._readings(transfer).get(leg.p_rank)
        if reading is None or reading.proven:
            return [Send(leg.p_epoch, Drained(leg))]
        reading.asked = True
        return [Send(leg.p_epoch, Busy(leg, reading.count))] if reading.count else self._at_zero(transfer, reading)

    def _offered_too_late(self, transfer: Transfer, message: Offer) -> list[Action]:
        reading = self._readings(transfer).get(message.leg.p_rank)
        over = reading is None or reading.proven
        return [Send(message.leg.p_epoch, Drained(message.leg))] if over else []

    # ------------------------------------------------------------ the other side is gone; our own fence

    def _source_lost(self, event: PeerLost) -> list[Action]:
        """What is read from now on may be anybody's. Its reads are still counted: its death proves nothing here."""
        actions: list[Action] = []
        for transfer in self._of(event.epoch):
            mine = [r for r in self._readings(transfer).values() if r.offer.leg.p_epoch == event.epoch]
            for reading in mine:
                reading.acked = True
            if transfer.state in UNDER_WAY:
                actions += self._hold(transfer, event.reason)
            if transfer.state is GIVEN_UP:
                actions += self._revoke_all([reading for reading in mine if not reading.proven])
        return actions

    def _asks_death(self, peer: Published) -> bool:
        """A fence of our own reads; that the source is gone says nothing about them."""
        return False

    def _ask_again(self, transfer: Transfer, event: Fired) -> list[Action]:
        """No fence was to be had. Prefill may be done with it and ABORT no more, so a drain is asked for here too."""
        tainted = [r for r in self._readings(transfer).values() if r.tainted and not r.proven and not r.count]
        drains = [TryDrain(reading.offer.leg) for reading in tainted]
        return [*drains, *self._refence(transfer, event)]

    def _fenced(self, event: Revoked) -> list[Action]:
        return self._drop() if event.proof.kind is ProofKind.GONE else self._revoked(event)

    # ------------------------------------------------------------ PING

    def reading(self) -> tuple[int, ...]:
        """Seqs whose lease a PING renews: being read now, not merely listed (guard N10)."""
        return tuple(sorted(t.tid.seq for t in self.transfers.values() if t.published and t.state in UNDER_WAY))


Row = Callable[..., list[Action]]

# (state, message type | event type | timer) -> what happens. No row: nothing changes.
TABLE: dict[tuple[State, object], Row] = {
    (ASKED, Ask): PullReader._ask,
    (ASKED, Accept): PullReader._accepted,
    (ASKED, Refused): PullReader._refused,
    (ASKED, Offer): PullReader._offered,
    (ASKED, Timer.REPEAT): PullReader._repeat_request,
    (CHECK, Checked): PullReader._checked,
    **{(state, Abort): PullReader._aborted for state in UNDER_WAY},
    **{(state, End): PullReader._end for state in UNDER_WAY},
    **{(state, Timer.DEADLINE): PullReader._deadline for state in UNDER_WAY},
    (State.COMMITTED, Offer): PullReader._done,
    (State.COMMITTED, Abort): PullReader._aborted_again,
    (State.COMMITTED, End): PullReader._finish,
    (GIVEN_UP, Offer): PullReader._offered_too_late,
    (GIVEN_UP, Abort): PullReader._aborted_again,
    (GIVEN_UP, Ack): PullReader._acknowledged,
    (GIVEN_UP, Timer.REPEAT): PullReader._repeat_failed,
    (GIVEN_UP, Timer.HOLD): PullReader._hold_expired,
    (GIVEN_UP, Timer.REFENCE): PullReader._ask_again,
}
PEER_TABLE: dict[type, Row] = {
    PeerLost: PullReader._source_lost,
    Revoked: PullReader._fenced,
    NotRevoked: PullReader._not_revoked,
}
