"""A transfer as seen by the rank that posts (protocol, section 4).

`Borrower` holds every (transfer, lender rank) that one prefill rank was offered. What it must never do is say
DRAINED while anything it posted may still land; what it must never forget is what it posted. Read `TABLE` first.
"""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core.borrowing import (
    ChunkReady,
    Complete,
    DrainSaid,
    Event,
    Fault,
    LenderGone,
    LenderUp,
    Paired,
    PostEnded,
    Record,
    State,
)
from quiesce.core.machine import Action, Arm, Fired, Heard, Opened, Post, Send, Stopped, Timer, TryDrain
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    HandOff,
    Leg,
    NeverStarted,
    Offer,
    Ping,
    Refused,
    Tainted,
)
from quiesce.core.posting import Chunk, Outcome
from quiesce.core.proofs import LeaseKey, ProofKind
from quiesce.core.records import Records

__all__ = [
    "TABLE",
    "Borrower",
    "Chunk",
    "ChunkReady",
    "Complete",
    "DrainSaid",
    "Event",
    "Fault",
    "LenderGone",
    "LenderUp",
    "Outcome",
    "Paired",
    "PostEnded",
    "Record",
    "State",
]

UNPAIRED = "computed before it was paired with a request"


class Borrower(Records):
    """Posting, failing and answering. What is remembered, and until when, is in `Records`."""

    # ------------------------------------------------------------ in

    def on(self, event: Event) -> list[Action]:
        if isinstance(event, Heard):
            return self._heard(event)
        if isinstance(event, LenderUp):
            return [] if self._up(event.epoch) else self._drop()
        if isinstance(event, LenderGone):
            return self._lender_gone(event)
        leg = event.about if isinstance(event, Fired) else event.leg
        record = self.record(leg) if isinstance(leg, Leg) else None
        if record is None or record.leg != leg:
            self.stale += 1  # another epoch's chunk, outcome or timer (guard A13)
            return []
        if isinstance(event, PostEnded):
            return self._post_ended(record, event)
        row = TABLE.get((record.state, event.timer if isinstance(event, Fired) else type(event)))
        return [] if row is None else row(self, record, event)

    def _heard(self, event: Heard) -> list[Action]:
        message, speaker = event.message, event.speaker
        if isinstance(message, Ping):
            return self._closed_set(message) if message.epoch == speaker else self._drop()
        leg = message.leg
        if leg.tid.epoch != speaker or leg.p_rank != self.rank:
            return self._drop()
        if leg.p_epoch != self.epoch:
            # Said to our predecessor. We know nothing of what it posted, and say so.
            return [Send(speaker, Refused(leg, "wrong epoch"))] if isinstance(message, Offer) else self._drop()
        record = self.record(leg)
        if record is None:
            return self._unknown(message)
        row = TABLE.get((record.state, type(message)))
        return self._drop() if row is None else row(self, record, message)

    def _unknown(self, message: HandOff) -> list[Action]:
        leg = message.leg
        to = leg.tid.epoch
        if isinstance(message, Offer):
            if to not in self.lenders:
                return [Send(to, Refused(leg, "unknown epoch"))]
            if self._is_closed(leg):
                return [Send(to, Refused(leg, "closed"))]
            if self.known >= self.max_records:
                return [Send(to, Refused(leg, "full"))]  # evict nothing (guard D7)
            ahead = self.ahead
            self._store(Record(leg, offer=message, answer=Accept(leg, ahead)))
            return [Send(to, Accept(leg, ahead)), Opened(leg)]
        if isinstance(message, Abort) and to in self.lenders:
            if self._is_closed(leg):
                return [Send(to, Drained(leg))]
            if self.known >= 2 * self.max_records:
                return self._drop()  # no room to remember it, so no answer: the lender holds and asks again
            # Tombstone first, then the answer: the OFFER that this ABORT overtook must find it (guard N5).
            self._store(Record(leg, State.TOMBSTONE, stop=True))
            self.ended["never_started"] += 1
            return [Send(to, NeverStarted(leg))]
        return self._drop()

    # ------------------------------------------------------------ posting

    def _pair(self, record: Record, event: Paired) -> list[Action]:
        """Offer and request are about the same tokens, model, adapter and tenant, or nothing is posted (guard L9)."""
        assert record.offer is not None
        if event.pairing != record.offer.pairing:
            return self._fail(record, f"pairing: room {record.offer.room} was offered for another prompt")
        record.paired = True
        return []

    def _chunk(self, record: Record, event: ChunkReady) -> list[Action]:
        assert record.offer is not None
        if not record.paired:
            return self._fail(record, UNPAIRED)
        chunk, granted = event.chunk, len(record.offer.grant.pages)
        if chunk.first != record.posted + sum(len(c.source) for c in record.queue):
            return self._fail(record, f"chunk starts at page {chunk.first}: a gap or an overlap")
        if chunk.first + len(chunk.source) > granted:
            return self._fail(record, f"{chunk.first + len(chunk.source)} pages computed, {granted} granted")
        starts = range(0, len(chunk.source), self.batch)
        record.queue += [Chunk(chunk.source[at : at + self.batch], chunk.first + at) for at in starts]
        return self._pump(record)

    def _post(self, record: Record, chunk: Chunk, number: int) -> Post:
        assert record.offer is not None
        if not record.lent:
            self.sources.lend(LeaseKey.source(record.leg))
            record.lent = True
        grant = record.offer.grant
        record.posted += len(chunk.source)
        return Post(
            leg=record.leg,
            number=number,
            source=chunk.source,
            destination=grant.pages[chunk.first : chunk.first + len(chunk.source)],
            grant=grant,
        )

    def _complete(self, record: Record, event: Complete) -> list[Action]:
        if not record.paired:
            return self._fail(record, UNPAIRED)
        record.complete = True
        record.tokens, record.result, record.digest = event.tokens, event.result, event.digest
        return self._done_if_landed(record)

    def _post_ended(self, record: Record, event: PostEnded) -> list[Action]:
        if not self._count_down(record, event.number, event.outcome):
            return self._drop()
        actions: list[Action] = []
        if record.state is State.OPEN:
            if event.outcome is Outcome.PLACED:
                actions += self._pump(record)
                return actions + self._done_if_landed(record)
            return self._fail(record, WRITE_FAILED[event.outcome])
        self._settle(record)
        return self._answer_at_zero(record)

    def _done_if_landed(self, record: Record) -> list[Action]:
        """DONE cannot be said while anything is queued or posted (guard L3)."""
        landed = record.complete and not record.count and not record.queue and not record.stop
        if record.state is not State.OPEN or not landed:
            return []
        self._leave_open(record, State.DONE)
        record.answer = Done(record.leg, record.posted, record.tokens, record.digest, record.result)
        self.ended["done"] += 1
        self._settle(record, ProofKind.COMPLETED)
        return [*self._say(record), Stopped(record.leg, "done")]

    # ------------------------------------------------------------ failing

    def _fault(self, record: Record, event: Fault) -> list[Action]:
        return self._fail(record, event.reason)

    def _fail(self, record: Record, reason: str) -> list[Action]:
        """Reaches every lender rank of the transfer, with the first cause (guard N7)."""
        legs = [leg for leg in self.records[record.leg.tid].values() if leg.state is State.OPEN]
        return [action for leg in legs for action in self._fail_one(leg, reason)]

    def _fail_one(self, record: Record, reason: str) -> list[Action]:
        self._stop(record)
        self._leave_open(record, State.FAILED)
        record.answer = Failed(record.leg, reason)
        self.ended["failed"] += 1
        self._settle(record)
        return [*self._say(record), Stopped(record.leg, reason)]

    def _say(self, record: Record) -> list[Action]:
        """DONE and FAILED are repeated until their ACK."""
        assert record.answer is not None
        record.repeats = 0
        return [Send(record.leg.tid.epoch, record.answer), Arm(Timer.REPEAT, record.leg)]

    def _say_again(self, record: Record, event: Fired) -> list[Action]:
        if record.acked or record.answer is None:
            return []
        record.repeats += 1
        return [
            Send(record.leg.tid.epoch, record.answer),
            Arm(Timer.REPEAT, record.leg, record.repeats),
        ]

    # ------------------------------------------------------------ ABORT and its answer

    def _abort(self, record: Record, message: Abort) -> list[Action]:
        """Close, then answer. Registering the abort tries once itself (guard A3)."""
        stopped: list[Action] = [Stopped(record.leg, message.reason)] if record.state is State.OPEN else []
        self._stop(record)
        record.asked = True
        self._leave_open(record, State.CLOSING)
        self._settle(record)
        if record.count:
            return [*stopped, Send(record.leg.tid.epoch, Busy(record.leg, record.count))]
        return stopped + self._answer_at_zero(record)

    def _abort_while_closing(self, record: Record, message: Abort) -> list[Action]:
        record.asked = True
        return [Send(record.leg.tid.epoch, Busy(record.leg, record.count))]

    def _abort_when_done(self, record: Record, message: Abort) -> list[Action]:
        record.state = State.TOMBSTONE
        return [Send(record.leg.tid.epoch, Drained(record.leg))]

    def _abort_when_tainted(self, record: Record, message: Abort) -> list[Action]:
        record.asked = True
        return [Send(record.leg.tid.epoch, Tainted(record.leg)), TryDrain(record.leg)]

    def _answer_at_zero(self, record: Record) -> list[Action]:
        """Whoever brings the count to zero answers (guard A3)."""
        if record.count:
            return []
        if record.covered:
            self._forget(record)
            return []
        if record.state is not State.CLOSING:
            return []
        if record.tainted:
            record.state = State.TAINTED
            self.sources.retain(record.leg.tid)  # no proof is to be had for now: said where operators look
            return [Send(record.leg.tid.epoch, Tainted(record.leg)), TryDrain(record.leg)]
        return self._drained(record)

    def _drained(self, record: Record) -> list[Action]:
        record.state = State.TOMBSTONE
        self.ended["drained"] += 1
        return [Send(record.leg.tid.epoch, Drained(record.leg))] if record.asked else []

    def _drain_said(self, record: Record, event: DrainSaid) -> list[Action]:
        """Only a drain proven on the connection that carried the lost post ends a taint (guard A15)."""
        if not event.proven:
            return []
        record.tainted = False
        self._settle(record)
        return self._drained(record)

    # ------------------------------------------------------------ repeats and acks

    def _offer_again(self, record: Record, message: Offer) -> list[Action]:
        """A known id, in any state: the current answer, never opened again."""
        leg, to = record.leg, record.leg.tid.epoch
        if record.state is State.CLOSING:
            return [Send(to, Busy(leg, record.count))]
        if record.state is State.TAINTED:
            return [Send(to, Tainted(leg))]
        if record.state is State.TOMBSTONE:
            return [Send(to, Refused(leg, "ended"))]
        assert record.answer is not None
        return [Send(to, record.answer)]

    def _ack_done(self, record: Record, message: Ack) -> list[Action]:
        record.state = State.TOMBSTONE  # not forgotten: a late duplicate OFFER must find it (guard N5)
        return []

    def _ack_failed(self, record: Record, message: Ack) -> list[Action]:
        record.acked = True  # stops repeating; count and taint stay until ABORT closes it
        return []

    def _abort_at_tombstone(self, record: Record, message: Abort) -> list[Action]:
        return [Send(record.leg.tid.epoch, Drained(record.leg))]


WRITE_FAILED = {
    Outcome.FAILED_CLEAN: "a write into the decode worker's pages failed; nothing more of it will land",
    Outcome.UNKNOWN: "a write into the decode worker's pages may have failed; what lands of it is not known",
}

Row = Callable[..., list[Action]]

# (state, message type | event type | timer) -> what happens. No row: dropped and counted.
TABLE: dict[tuple[State, object], Row] = {
    (State.OPEN, Offer): Borrower._offer_again,
    (State.OPEN, Abort): Borrower._abort,
    (State.OPEN, Paired): Borrower._pair,
    (State.OPEN, ChunkReady): Borrower._chunk,
    (State.OPEN, Complete): Borrower._complete,
    (State.OPEN, Fault): Borrower._fault,
    (State.CLOSING, Offer): Borrower._offer_again,
    (State.CLOSING, Abort): Borrower._abort_while_closing,
    (State.FAILED, Offer): Borrower._offer_again,
    (State.FAILED, Abort): Borrower._abort,
    (State.FAILED, Ack): Borrower._ack_failed,
    (State.FAILED, Timer.REPEAT): Borrower._say_again,
    (State.DONE, Offer): Borrower._offer_again,
    (State.DONE, Abort): Borrower._abort_when_done,
    (State.DONE, Ack): Borrower._ack_done,
    (State.DONE, Timer.REPEAT): Borrower._say_again,
    (State.TAINTED, Offer): Borrower._offer_again,
    (State.TAINTED, Abort): Borrower._abort_when_tainted,
    (State.TAINTED, DrainSaid): Borrower._drain_said,
    (State.TOMBSTONE, Offer): Borrower._offer_again,
    (State.TOMBSTONE, Abort): Borrower._abort_at_tombstone,
}
