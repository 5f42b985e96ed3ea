"""The borrower with one guard removed each."""

from __future__ import annotations

import dataclasses
from typing import Any

from quiesce.core.borrower import TABLE, Borrower, Outcome, State
from quiesce.core.borrowing import DrainSaid, Paired, PostEnded, Record
from quiesce.core.machine import Heard, Send, Stopped
from quiesce.core.messages import Abort, Ack, Done, Leg, NeverStarted
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_heard = Borrower._heard
real_unknown = Borrower._unknown
real_post = Borrower._post
real_post_ended = Borrower._post_ended
real_fail_one = Borrower._fail_one
real_drained = Borrower._drained
real_answer = Borrower._answer_at_zero
real_close = Borrower._close_unanswered
real_abort = Borrower._abort


def forget(self: Borrower, record: Record) -> None:
    """What must not be: the record goes while its lender may still speak of it."""
    if self.records.get(record.leg.tid, {}).get(record.leg.d_rank) is record:
        self._remove(record)


# ---------------------------------------------------------------- holding the sources


@mutant("H14", "H14", "source pages are not lent to the posts that read them", arenas.SOURCES, (Borrower, "_post"))
def h14(self: Borrower, record: Record, chunk: Any, number: int) -> Any:
    record.lent = True
    return real_post(self, record, chunk, number)


# ---------------------------------------------------------------- tombstones, epochs


@mutant("N5 abort", "N5", "ABORT of an unknown id leaves no tombstone", arenas.TWO, (Borrower, "_unknown"))
def n5_abort(self: Borrower, message: Any) -> Any:
    actions = real_unknown(self, message)
    if isinstance(message, Abort) and self.record(message.leg) is not None:
        forget(self, self.records[message.leg.tid][message.leg.d_rank])
    return actions


@mutant("N5 drained", "N5 N9", "what was drained is forgotten", arenas.TWO, (Borrower, "_drained"))
def n5_drained(self: Borrower, record: Record) -> Any:
    actions = real_drained(self, record)
    forget(self, record)
    return actions


@mutant("N5 done", "N5 N9", "what was acknowledged is forgotten", arenas.TWO, (TABLE, (State.DONE, Ack)))
def n5_done(self: Borrower, record: Record, message: Ack) -> Any:
    forget(self, record)
    return []


@mutant(
    "N5 closed", "N5", "the closed set is not asked when an offer comes late", arenas.PINGS, (Borrower, "_unknown")
)
def n5_closed(self: Borrower, message: Any) -> Any:
    sets, self._heard_sets = self._heard_sets, {}
    try:
        return real_unknown(self, message)
    finally:
        self._heard_sets = sets


@mutant("A14", "A14 H16", "an offer to the engine that ran here before is taken", arenas.CRASH, (Borrower, "_heard"))
def a14(self: Borrower, event: Heard) -> Any:
    mine, leg = self.epoch, getattr(event.message, "leg", None)
    self.epoch = mine if leg is None else leg.p_epoch
    try:
        return real_heard(self, event)
    finally:
        self.epoch = mine


@mutant("N7", "N7", "a failure is kept to itself", arenas.LIVE_FAULT, (Borrower, "_fail_one"), live=True)
def n7(self: Borrower, record: Record, reason: str) -> Any:
    before = record.answer
    actions = real_fail_one(self, record, reason)
    record.answer = before  # a repeated OFFER hears ACCEPT as if nothing had happened
    return [action for action in actions if not isinstance(action, Send)]


@mutant(
    "N9",
    "N9 A15",
    "a tainted record stays when its id is closed",
    arenas.LIVE_FENCE,
    (Borrower, "_close_unanswered"),
    live=True,
)
def n9(self: Borrower, records: Any, reason: str) -> Any:
    return real_close(self, [record for record in records if not record.tainted], reason)


# ---------------------------------------------------------------- the count and the answer


@mutant("A1", "A1", "the answer to ABORT does not look at the count", arenas.TWO, (TABLE, (State.OPEN, Abort)))
def a1(self: Borrower, record: Record, message: Abort) -> Any:
    self._stop(record)
    record.asked = True
    return real_drained(self, record)


@mutant(
    "A2",
    "A2",
    "ABORT is answered, but the queue goes on",
    arenas.CHUNKS,
    (Borrower, "_stop"),
    (Borrower, "_post_ended"),
)
def a2(self: Borrower, record: Record, event: PostEnded | None = None) -> Any:
    if event is None:
        return []  # the stop flag stays down
    if record.state is not State.CLOSING or not record.queue:
        return real_post_ended(self, record, event)
    record.posts.discard(event.number)
    return self._pump(record) + real_drained(self, record)


@mutant(
    "A3 register",
    "A3",
    "registering an abort does not try to answer",
    arenas.LIVE,
    (TABLE, (State.OPEN, Abort)),
    live=True,
)
def a3_register(self: Borrower, record: Record, message: Abort) -> Any:
    stopped = [action for action in real_abort(self, record, message) if isinstance(action, Stopped)]
    record.state = State.CLOSING
    return stopped


@mutant("A3 outcome", "A3", "the last outcome does not answer", arenas.LIVE, (Borrower, "_post_ended"), live=True)
def a3_outcome(self: Borrower, record: Record, event: PostEnded) -> Any:
    if record.state is State.CLOSING:
        record.posts.discard(event.number)
        return []
    return real_post_ended(self, record, event)


@mutant(
    "A4 + A5",
    "A4 A5",
    "a failed request is forgotten, and what is unknown was never started",
    arenas.SOURCES,
    (Borrower, "_fail_one"),
)
def a4(self: Borrower, record: Record, reason: str) -> Any:
    actions = real_fail_one(self, record, reason)
    forget(self, record)
    return actions


@mutant("A5", "A5", "not open any more, so never started", arenas.SOURCES, (TABLE, (State.FAILED, Abort)))
def a5(self: Borrower, record: Record, message: Abort) -> Any:
    return [Send(record.leg.tid.epoch, NeverStarted(record.leg))]


@mutant(
    "A6", "A6", "the second decode rank overwrites the first", arenas.LIVE_DECODES, (Borrower, "record"), live=True
)
def a6(self: Borrower, leg: Leg) -> Record | None:
    return next(iter(self.records.get(leg.tid, {}).values()), None)


@mutant("A9", "A9", "an error counts as drained", arenas.TAINT, (Borrower, "_post_ended"))
def a9(self: Borrower, record: Record, event: PostEnded) -> Any:
    clean = Outcome.FAILED_CLEAN if event.outcome is Outcome.UNKNOWN else event.outcome
    return real_post_ended(self, record, dataclasses.replace(event, outcome=clean))


@mutant("A11", "A11", "the first error clears the whole count", arenas.WIDE, (Borrower, "_post_ended"))
def a11(self: Borrower, record: Record, event: PostEnded) -> Any:
    if event.outcome is Outcome.FAILED_CLEAN:
        record.posts &= {event.number}
    return real_post_ended(self, record, event)


@mutant("A15", "A15", "asking for a drain is taken for one", arenas.TAINT, (TABLE, (State.TAINTED, DrainSaid)))
def a15(self: Borrower, record: Record, event: DrainSaid) -> Any:
    record.tainted = False
    self._settle(record)
    return real_drained(self, record)


@mutant("L9", "L9", "the pairing digest is not compared", arenas.MISPAIRED, (TABLE, (State.OPEN, Paired)))
def l9(self: Borrower, record: Record, event: Paired) -> Any:
    record.paired = True
    return []


@mutant("L3", "L3", "DONE is said while a post is under way", arenas.TWO, (Borrower, "_done_if_landed"))
def l3(self: Borrower, record: Record) -> Any:
    if record.state is not State.OPEN or not record.complete:
        return []
    record.state = State.DONE
    record.answer = Done(record.leg, record.posted, record.tokens, record.digest, record.result)
    return self._say(record)
