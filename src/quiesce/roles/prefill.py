"""The prefill worker: pairs offers with requests, computes chunks, and posts each as soon as it is computed."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from quiesce.channel import Received
from quiesce.core.admission import pages_for
from quiesce.core.borrower import (
    Borrower,
    Chunk,
    ChunkReady,
    Complete,
    DrainSaid,
    Fault,
    LenderGone,
    LenderUp,
    Paired,
    PostEnded,
    State,
)
from quiesce.core.borrower import Event as BorrowerEvent
from quiesce.core.lending import Transfer
from quiesce.core.machine import Action, Arm, Fired, Heard, Opened, Post, Send, Stopped, TryDrain
from quiesce.core.messages import Await, Busy, FirstToken, HandOff, Leg, Offer, Ping, Reached, Sample, TransferId
from quiesce.engine.engine import Engine, Result
from quiesce.roles.decode_peers import DecodePeers
from quiesce.roles.late import Turns
from quiesce.roles.legs import LONE, WorkerLeg, fault_of
from quiesce.roles.null_peers import NullDecode
from quiesce.roles.posts import Posts
from quiesce.roles.proving import check_transport
from quiesce.roles.report import Standing, prefill_samples
from quiesce.roles.sequence import Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.siblings import Siblings
from quiesce.roles.steps import failure
from quiesce.roles.worker import Worker
from quiesce.transfer.interface import Transport

log = logging.getLogger("quiesce.prefill")

ORPHAN_SECONDS = 2.0  # an offer waits this long for its request; routers send both at once
POST_WINDOW = 4
LATE_PLACES = 2  # under --reserve late: one prompt being computed and one whose pages are ready


@dataclass(eq=False)
class Job:
    """One offer: the request it was paired with, and how far its pages have been handed to the borrower."""

    leg: Leg
    room: int
    request: WorkerLeg | None = None
    sequence: Sequence | None = None
    posted: int = 0

    def began(self) -> None:
        """Its first page is offered, or goes, now."""
        if self.request is not None and self.request.transfer_began is None:
            self.request.transfer_began = time.monotonic()


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, settings: WorkerSettings, engine: Engine, transport: Transport) -> None:
        check_transport(transport.caps, settings)
        super().__init__(settings, engine)
        self.transport, self.caps = transport, transport.caps
        self.picks, self.used_up = transport.picks, transport.used_up
        self.region = transport.register(engine.kv.arena)
        self.poller.register(transport.fileno(), zmq.POLLIN)
        self.peers = DecodePeers(self.listener, transport, self.epoch, self.fingerprint(), self.peer_up)
        self.jobs: dict[int, Job] = {}  # by room
        self.by_leg: dict[Leg, Job] = {}
        self.by_tid: dict[TransferId, Job] = {}
        self.turns = Turns(lambda epoch, room: self.peers.send(epoch, Reached(room)))
        self.siblings = Siblings(self.batch, self._copy_prompt)
        self.queue: deque[Job] = deque()  # paired, waiting for pages
        self.machine()

    # ------------------------------------------------------------ what pull has otherwise

    def machine(self) -> None:
        self.borrower = Borrower(self.epoch, self.ledger, window=POST_WINDOW, batch=self.settings.max_transfer_pages)
        self.posts = Posts(self.tell)
        self.null = NullDecode(self.epoch)
        self.tell(LenderUp(self.null.epoch))

    def probe(self, leg: WorkerLeg) -> bool:
        """A test request begins. False: there is no room for it."""
        tokens = len(leg.start.token_ids)
        pairing = leg.pairing(self.engine.fingerprint.model)
        room = self.null.offer(leg.start.room, pairing, tokens, pages_for(tokens, self.settings.page_size))
        self._hear_null()
        return room

    def peer_up(self, epoch: int) -> bool:
        """A session stands. False: that process was taken for dead."""
        self.tell(LenderUp(epoch))
        return epoch in self.borrower.lenders

    def asked(self, leg: Leg) -> Offer | Transfer:
        """What decode asked for: its room, its tokens."""
        record = self.borrower.record(leg)
        assert record is not None and record.offer is not None
        return record.offer

    def compare(self, leg: Leg, pairing: bytes) -> bool:
        """Offer and request are about the same prompt. False: the transfer has failed of it (guard L9)."""
        self.tell(Paired(leg, pairing))
        record = self.borrower.record(leg)
        return record is not None and record.state is State.OPEN

    def fault(self, leg: Leg, reason: str) -> None:
        self.tell(Fault(leg, reason))

    def ready(self, job: Job, sequence: Sequence, first: FirstToken | None) -> None:
        """More of the prompt is computed; `first`: all of it. Full pages go at once, the partial one with the last
        chunk (guard L1)."""
        ready = sequence.computed // self.settings.page_size if first is None else len(sequence.pages)
        if ready > job.posted:
            job.began()
            chunk = Chunk(tuple(sequence.pages[job.posted : ready]), job.posted)
            job.posted = ready
            self.tell(ChunkReady(job.leg, chunk))
        if first is not None:
            self.tell(Complete(job.leg, len(sequence.tokens), first))

    def transport_turn(self) -> None:
        for made, outcome in self.transport.poll():
            self._guarded(self.posts.ended, made, outcome)
        for event in self.transport.events():
            if event.final and event.peer_epoch in self.peers.by_epoch:
                self._guarded(self.peer_gone, event.peer_epoch)

    def peer_gone(self, epoch: int) -> None:
        self.tell(LenderGone(epoch))
        self.forget(epoch)

    # ------------------------------------------------------------ pairing

    def start(self, leg: WorkerLeg) -> None:
        if leg.start.probe:
            if not self.probe(leg):
                self.say_end(leg, "refused", 503, "there is no room for a test request")
            return
        job = self.jobs.get(leg.start.room)
        if job is not None:
            self._pair(job, leg)

    def _opened(self, leg: Leg) -> None:
        room = self.asked(leg).room
        if room in self.jobs:
            self.fault(leg, f"room {room} is in use by another transfer")
            return
        job = self.jobs[room] = self.by_leg[leg] = Job(leg, room)
        self.turns.forget(room)
        request = self.legs.by_room.get(room)
        if request is not None:
            self._pair(job, request)
        else:
            self.timers.after(ORPHAN_SECONDS, ("orphan", leg), lambda: self._orphaned(job))

    def _orphaned(self, job: Job) -> None:
        if job.request is None:
            self.unpaired += 1
            self.fault(job.leg, f"{LONE} {job.room} arrived within {ORPHAN_SECONDS:.0f} s")

    def _pair(self, job: Job, request: WorkerLeg) -> None:
        """What was asked for and the request are compared before anything is lent or posted (guard L9)."""
        self.timers.cancel(("orphan", job.leg))
        asked = self.asked(job.leg)
        job.request, request.tid, request.offered_by = request, job.leg.tid, job.leg.tid.epoch
        tokens = len(request.start.token_ids)
        if asked.tokens != tokens:
            self.fault(job.leg, f"pairing: {asked.tokens} tokens are asked for, the prompt has {tokens}")
            return
        if not self.compare(job.leg, request.pairing(self.engine.fingerprint.model)):
            return
        job.sequence = self.sequence(request, job.leg.tid)
        self.by_tid[job.leg.tid] = job
        if request.start.probe:
            self.queue.appendleft(job)
        else:
            self.queue.append(job)

    @staticmethod
    def sequence(request: WorkerLeg, tid: TransferId) -> Sequence:
        return Sequence(
            tid=tid,
            rid=request.rid,
            prompt_tokens=request.prompt_tokens,
            tokens=list(request.start.token_ids),
            sampling=request.start.sampling,
            eos=frozenset(),
            probe=request.start.probe,
            grammar=request.grammar,
        )

    def give_up(self, leg: WorkerLeg, outcome: Literal["cancelled", "failed"], status: int, reason: str) -> None:
        self.say_end(leg, outcome, status, reason)
        self.turns.forget(leg.start.room)
        job = self.jobs.get(leg.start.room)
        if job is not None and job.request is leg:
            self.fault(job.leg, reason)

    # ------------------------------------------------------------ computing

    def schedule(self) -> None:
        """In order of arrival: the first that does not fit waits for pages, and all behind it with it."""
        self.turns.call(LATE_PLACES - len(self.by_leg), self.legs.by_room.__contains__)
        while self.queue and not self.batch.full:
            job = self.queue[0]
            sequence = job.sequence
            assert sequence is not None
            pages = self.ledger.own(sequence.tid, pages_for(len(sequence.tokens), self.settings.page_size))
            if pages is None:
                return
            self.queue.popleft()
            sequence.pages = array("i", pages)
            assert job.request is not None
            self.budget.belongs(sequence.tid, job.request.start.tenant)
            job.request.left_queue = time.monotonic()
            alone = sequence.sampling.prompt_logprobs is not None  # they come from computing it
            self.siblings.join(sequence, "" if alone else job.request.start.group)

    def _copy_prompt(self, eldest: Sequence, sibling: Sequence) -> None:
        """Writes the sibling's pages, under a lease like any step of ours: an ended holding refuses it."""
        self.ledger.lend(sibling.lease)
        try:
            self.engine.kv.copy(eldest.pages[: len(sibling.pages)], sibling.pages)
        finally:  # it copies on this thread: whatever it raises, nothing of it goes on
            self.ledger.close(sibling.lease, sibling.completed)

    def computed(self, sequence: Sequence, result: Result) -> None:
        job = self.by_tid[sequence.tid]
        finished = sequence.computed >= len(sequence.tokens)
        assert job.request is not None
        if sequence.sampling.prompt_logprobs is not None:
            self.legs.prompt_logprobs(job.request, sequence.computed, result.prompt_logprobs)
        if finished:
            self.siblings.computed(sequence)
            self.batch.remove(sequence)
        assert result.sampled is not None or not finished
        first = FirstToken(result.sampled.token, logprob=result.sampled.logprob) if result.sampled else None
        self.ready(job, sequence, first if finished else None)

    def rid_of(self, tid: TransferId) -> str | None:
        job = self.by_tid.get(tid)
        return None if job is None or job.request is None else job.request.rid

    def retract(self, sequence: Sequence) -> None:
        raise AssertionError(f"{sequence.tid}: a prompt has all its pages from the start")

    def step_failed(self, sequence: Sequence, error: Exception) -> None:
        job = self.by_tid[sequence.tid]
        assert job.request is not None
        self.give_up(job.request, "failed", *failure(sequence, error))

    # ------------------------------------------------------------ the machine

    def tell(self, event: BorrowerEvent) -> None:
        with self.watchers:
            self.carry_out(self.borrower.on(event))

    def act(self, action: Action) -> None:
        match action:
            case Send(to, message):
                if isinstance(message, Busy):  # the core has no clock
                    message = msgspec.structs.replace(message, oldest_ms=self.posts.oldest_ms(message.leg))
                if to == self.null.epoch:
                    self.null.hear(message)
                    self._hear_null()
                else:
                    self.peers.send(to, message)
            case Arm():
                self.timers.arm(action)
            case Opened(leg):
                self._opened(leg)
            case Post(leg=leg) if leg.tid.epoch == self.null.epoch:
                self.tell(PostEnded(leg, action.number, self.null.write(action)))
            case Post(leg=leg, source=source, destination=destination, grant=grant):
                session = self.peers.by_epoch.get(leg.tid.epoch)
                peer = None if session is None else session.peer
                self.posts.make(action, peer, lambda peer: self.transport.write(peer, source, destination, grant))
            case TryDrain(leg):
                self.tell(DrainSaid(leg, self.peers.drained(leg.tid.epoch)))
            case Stopped(leg, reason):
                record = self.borrower.record(leg)
                asked = record is not None and record.asked  # the decode worker gave it up, and says why itself
                self.stopped(leg, reason, "done" if reason == "done" else "given up" if asked else "failed")
            case _:
                raise AssertionError(f"a borrower does not ask for {action}")

    def _hear_null(self) -> None:
        """What the probe's other half says, at once."""
        while self.null.said:
            self.tell(Heard(self.null.said.popleft(), self.null.epoch))

    def stopped(self, leg: Leg, reason: str, how: Literal["done", "given up", "failed"]) -> None:
        """Nothing more is done for it: stop computing, and say the request's last word."""
        job = self.by_leg.pop(leg, None)
        if job is None:
            return
        self.timers.cancel(("orphan", leg))
        if self.jobs.get(job.room) is job:
            del self.jobs[job.room]
        self.by_tid.pop(leg.tid, None)
        if job in self.queue:
            self.queue.remove(job)
        if job.sequence is not None:
            self.siblings.leave(job.sequence)
            self.batch.remove(job.sequence)
        if job.request is None:
            return
        if how == "done":
            job.request.transfer_ended = time.monotonic()
            self.say_end(job.request, "handed_over")
        elif how == "given up":
            self.say_end(job.request, "cancelled", 502, reason)
        else:
            spoke = self.legs.by_rid.get(job.request.rid) is not job.request  # it had its last word: a cancel
            self.transfers_failed += not (spoke or job.request.start.probe)
            status, fault = fault_of(reason)
            self.say_end(job.request, "failed", status, reason, fault)

    def fire(self, payload: object) -> None:
        assert isinstance(payload, Fired)
        self.tell(payload)

    # ------------------------------------------------------------ peers

    def heard(self, received: Received) -> None:
        if self.peers.session(received, self.thread.steps):
            return
        speaker = self.peers.speaker(received)
        if speaker is None:
            self.listener.counts.misplaced += 1  # no session, or none any more
            return
        if isinstance(received.message, Await):
            self.turns.asked(speaker, received.message.room)
        elif isinstance(received.message, HandOff | Ping):
            self.hear(received.message, speaker)

    def hear(self, message: HandOff | Ping, speaker: int) -> None:
        self.tell(Heard(message, speaker))

    def peers_turn(self) -> None:
        self.transport_turn()

    def forget(self, epoch: int) -> None:
        self.turns.drop(epoch)
        self.peers.forget(epoch)

    # ------------------------------------------------------------ looking and leaving

    def samples(self) -> list[Sample]:
        return prefill_samples(self)

    def standing(self) -> Standing:
        borrower = self.borrower
        return Standing(borrower.known, borrower.ended, borrower.taints, borrower.stale)

    def tables(self) -> dict[str, Any]:
        return {
            "queue": len(self.queue),
            "turns": len(self.turns),
            "siblings": len(self.siblings),
            "offers": len(self.by_leg),
            "transport": self.transport.report(),
            "sessions": len(self.peers),
            "half_open": self.peers.half_open,
            "stale": self.standing().stale,
            **self.machine_tables(),
        }

    def machine_tables(self) -> dict[str, Any]:
        records = Counter(record.state.value for record in self.borrower.all_records())
        return {"records": dict(records), "posts": len(self.posts)}

    def close(self) -> None:
        self.transport.close_all()
        super().close()


def run(settings: WorkerSettings) -> int:
    from quiesce.roles.assembly import make_engine, make_transport, make_worker  # noqa: PLC0415  (torch loads here)

    engine = make_engine(settings)
    return make_worker(settings, engine, make_transport(settings)).run()
