"""What every worker is: one loop that owns the ledger, the machines and the sockets, and an engine thread beside it.

A turn of the loop: hear the peers, whose word may free pages, empty the inbox, then fire timers (after a pause the
answers that waited come first), collect the engine step that ended, start the next one. Nothing in it blocks, and
each part of it is bounded: whoever sends more than we can do waits longer, running answers do not.
"""

from __future__ import annotations

import gc
import logging
import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
import zmq

from quiesce.channel import KeyRing, Received, start_authenticator
from quiesce.core.fingerprint import Fingerprint, Limits
from quiesce.core.ledger import Ledger
from quiesce.core.machine import Action
from quiesce.core.messages import (
    Cancel,
    Ended,
    Inspect,
    Inspected,
    Sample,
    Start,
    TransferId,
    Whose,
)
from quiesce.core.pages import PagePool
from quiesce.engine.engine import Engine, Result
from quiesce.roles.admitting import hold_budget, refusal
from quiesce.roles.compiling import Compiler
from quiesce.roles.engine_thread import EngineThread
from quiesce.roles.legs import OVERDUE, Legs, WorkerLeg
from quiesce.roles.meters import Holds, Transfers, Waits
from quiesce.roles.ownership import OwnershipLog
from quiesce.roles.proving import worn_out
from quiesce.roles.registration import HEARTBEAT, Registration, control_socket, own_keys
from quiesce.roles.report import record, worker_samples
from quiesce.roles.sequence import Batch, Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.silence import PAUSE
from quiesce.roles.standing import standing
from quiesce.roles.state import identity, state_of
from quiesce.roles.steps import Listeners, Steps
from quiesce.roles.timers import AT_ONCE, Delays, Timers
from quiesce.roles.wakes import Wakes
from quiesce.roles.watchers import Watchers
from quiesce.transfer.interface import Capabilities

log = logging.getLogger("quiesce.worker")

LONGEST_WAIT = 0.25  # seconds a turn may sleep
INBOX = 0.03  # seconds of a turn for messages while there are ever more of them
PART = 0.03  # seconds after which the engine is looked after between two parts of a turn
SWITCH = 0.001  # seconds until the engine's thread gets the interpreter from a busy loop
INBOX_AFTER_PAUSE = 2.0  # seconds for what waited: it is heard before any timer
LONGEST_REASON = 2000  # characters
LAST_WORDS_MS = 1000  # what was sent before the end still goes out
EXIT_RETAINED = 75  # too much is kept that only a new process gives back: a restart is the fence
SPARE_ROWS = 32  # at least so many beyond the running requests': holds keep theirs while new requests run


class Worker(ABC):
    role: Literal["prefill", "decode", "colocated"]
    caps: Capabilities | None = None  # of the transport, where there is one
    picks: Callable[[], tuple[str, ...]] = tuple  # for people: by which engines its pages travel, and why

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.epoch = settings.epoch
        self.context: zmq.Context[Any] = zmq.Context()
        self.keys = own_keys(settings)
        self.ring = KeyRing(settings.keys / "ring")
        self.authenticator = start_authenticator(self.context, self.ring)
        self.listener = control_socket(settings, self.context, self.keys)
        self.registration = Registration(self.context, settings.registry, settings.registry_public_key, self.keys)
        self.timers = Timers(Delays(hold=settings.hold_timeout))
        self.poller = Wakes()
        self.thread = EngineThread(engine)
        self.compiler = Compiler(engine.grammars)
        rows = settings.max_running + max(settings.max_running, SPARE_ROWS)
        self.ledger = Ledger(PagePool(engine.kv.pages), PagePool(rows, "rows"))
        self.budget = hold_budget(settings, self.ledger.pool.count, self.ledger.rows.count)
        self.batch = Batch(settings.max_running, settings.chunked_prefill_size)
        self.steps = Steps(
            self.thread,
            self.batch,
            self.ledger,
            settings.page_size,
            Listeners(self.computed, self.step_failed, self.retract),
        )
        self.legs = Legs(self.listener)
        self.ownership = OwnershipLog(self.rid_of, pages=engine.kv.pages)
        self.holds = Holds(self.ledger)
        self.waits, self.transfers = Waits(), Transfers()
        self.transfers_failed = 0
        self.unpaired = 0  # legs and offers whose other half never came
        self.watchers = Watchers(self.ledger, self.ownership, self.holds.observe, self.budget.observe)
        self.ledger.observe = self.watchers.observe
        self._todo: deque[Action] = deque()
        self._acting = False
        self.draining = False
        self._said_draining = False
        self._received = time.monotonic()
        self.drain_until = float("inf")
        self.exit_code = 0
        self.used_up: Callable[[], str | None] = lambda: None  # of the transport, where there is one
        self.faults = 0
        link = self.registration.link
        ends = (self.listener.socket, self.listener.monitor, link.socket, link.monitor)
        for readable in (*ends, self.thread.fileno(), self.compiler.fileno()):
            self.poller.register(readable, zmq.POLLIN)
        self.timers.after(0.0, "heartbeat", self._heartbeat)

    # ------------------------------------------------------------ what a role adds

    @abstractmethod
    def start(self, leg: WorkerLeg) -> None:
        """A leg that was let in."""

    @abstractmethod
    def give_up(self, leg: WorkerLeg, outcome: Literal["cancelled", "failed"], status: int, reason: str) -> None:
        """The leg ends now, whatever it was doing; says its last word."""

    @abstractmethod
    def computed(self, sequence: Sequence, result: Result) -> None: ...

    @abstractmethod
    def step_failed(self, sequence: Sequence, error: Exception) -> None: ...

    @abstractmethod
    def retract(self, sequence: Sequence) -> None:
        """The pool is short: give the pages back and compute them again when there is room."""

    @abstractmethod
    def schedule(self) -> None:
        """Moves what waits as far as it can go."""

    @abstractmethod
    def peers_turn(self) -> None:
        """Reads the peers' sockets and the transport."""

    def heard(self, received: Received) -> None:
        """A message from a peer of the hand-off."""
        self.misplaced(received, f"not for a {self.role} worker")

    def misplaced(self, received: Received, why: str) -> None:
        self.listener.counts.misplaced += 1
        log.warning("%s from %r is %s: ignored", type(received.message).__name__, received.user, why)

    def fire(self, payload: object) -> None:
        """A timer of the role's machines."""
        raise AssertionError(f"nobody waits for {payload!r}")

    def rid_of(self, tid: TransferId) -> str | None:
        """The request that a transfer is for, while it runs here."""
        return None

    def samples(self) -> list[Sample]:
        return []

    def tables(self) -> dict[str, Any]:
        return {}

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Serves until told to stop. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_stop)
        sys.setswitchinterval(SWITCH)
        gc.freeze()  # what start-up has made stays: to look through it all for garbage would stop answers for 0.1 s
        try:
            while not self._finished():
                self.turn(LONGEST_WAIT)
        finally:
            self.close()
        return self.exit_code

    def turn(self, longest: float) -> None:
        if self.draining and not self._said_draining:
            self._said_draining = True
            self._guarded(self._heartbeat)  # at once, so that nothing more is sent here
        self.poller.poll(math.ceil(self.timers.wait(longest) * 1000))
        began = time.monotonic()
        for part in (self.peers_turn, self._receive, self._fire, self._compiled):
            self._guarded(part)
            if time.monotonic() - began > PART:
                self._guarded(self._collect)
                self.steps.launch()
                began = time.monotonic()
        self._guarded(self._collect)
        self._guarded(self.schedule)
        self.steps.launch()
        for router in self.legs.flush(time.monotonic()):
            log.error("the router does not read its answers; its legs are cancelled")
            for leg in self.legs.of(router):
                self.give_up(leg, "cancelled", 499, "the router is gone")

    def _collect(self) -> None:
        self.legs.gather()
        try:
            self.steps.collect()
        finally:
            self.legs.send()

    def _fire(self) -> None:
        for payload in self.timers.due():
            self._guarded(payload) if callable(payload) else self._guarded(self.fire, payload)

    def carry_out(self, actions: Iterable[Action]) -> None:
        """A machine's actions in order, those that come of them behind; one that fails loses none of the others."""
        self._todo.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._todo:
                self._guarded(self.act, self._todo.popleft())
        finally:
            self._acting = False

    def act(self, action: Action) -> None:
        """Does what a machine of this role asks for."""
        raise AssertionError(f"a {self.role} worker has no machine that asks for {action}")

    def _guarded(self, call: Any, *arguments: Any) -> None:
        """A fault ends what it was about, not the engine. A broken rule of the core does end it."""
        try:
            call(*arguments)
        except AssertionError:
            raise
        except Exception:
            self.faults += 1
            log.exception("unexpected fault in %s; the worker goes on", getattr(call, "__name__", call))

    def _receive(self) -> None:
        now = time.monotonic()
        until = now + (INBOX_AFTER_PAUSE if now - self._received > PAUSE else INBOX)
        if self.poller.any_of(self.listener.socket, self.listener.monitor):
            while received := self.listener.receive(AT_ONCE):
                for item in received:
                    self._guarded(self._dispatch, item)
                if time.monotonic() > until:
                    break
        self._received = time.monotonic()
        link = self.registration.link
        gone = self.registration.turn() if self.poller.any_of(link.socket, link.monitor) else None
        if gone is not None:
            orphans = [leg for leg in self.legs.by_rid.values() if leg.start.router_epoch == gone]
            log.log(logging.WARNING if orphans else logging.INFO, "router %016x is gone", gone)
            for leg in orphans:
                self._guarded(self.give_up, leg, "cancelled", 499, "the router is gone")
                self.legs.drop(leg.router)

    def _dispatch(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Start | Cancel | Inspect):
            self.heard(received)
            return
        if received.user != self.settings.registry_public_key:
            self.misplaced(received, "the router's to say")
            return
        if isinstance(message, Start):
            self._start(message, received.sender)
        elif isinstance(message, Cancel):
            leg = self.legs.by_rid.get(message.rid)
            if leg is not None:
                self.give_up(leg, "cancelled", 499, message.reason)
        else:
            self.legs.tell(received.sender, self._inspected(message.seq, message.page))

    def _start(self, start: Start, router: bytes) -> None:
        refused = refusal(self, start)
        if refused is not None:
            self.legs.refuse(start, router, *refused)
            log.info("refused: %s", refused[1], extra={"rid": start.rid, "room": str(start.room)})
            return
        leg = WorkerLeg(start, router, time.monotonic())
        if start.sampling.grammar:
            leg.grammar = self.compiler.begin(leg.rid, start.sampling.grammar)
        self.legs.open(leg)
        self.timers.after(start.deadline_ms / 1000, ("leg", leg.rid), lambda: self._deadline(leg))
        self.start(leg)

    def _compiled(self) -> None:
        if not self.poller.any_of(self.compiler.fileno()):
            return
        for rid, why in self.compiler.failures():
            if (leg := self.legs.by_rid.get(rid)) is not None:
                self.give_up(leg, "failed", 400, f"its grammar: {why}")

    def _deadline(self, leg: WorkerLeg) -> None:
        if self.legs.by_rid.get(leg.rid) is leg:
            self.give_up(leg, "failed", 504, f"{OVERDUE} {leg.start.deadline_ms / 1000:.0f} s")

    # ------------------------------------------------------------ the last word

    def say_end(
        self,
        leg: WorkerLeg,
        outcome: Any,
        status: int = 200,
        reason: str = "",
        fault: Whose = "",
    ) -> None:
        """`fault`: of a failure, whose it was."""
        self.timers.cancel(("leg", leg.rid))
        ended = Ended(
            rid=leg.rid,
            outcome=outcome,
            status=status,
            reason=reason[:LONGEST_REASON],
            prompt_tokens=leg.prompt_tokens,
            completion_tokens=leg.generated,
            cached_tokens=leg.cached_tokens,
            fault=fault,
        )
        if self.legs.end(leg, ended):
            record(self, leg, ended)

    # ------------------------------------------------------------ standing

    def limits(self) -> Limits:
        return Limits(
            context_length=self.settings.context_length or self.engine.context_length,
            pool_tokens=self.engine.kv.pages * self.settings.page_size,
            max_queued=self.settings.max_queued,
        )

    def fingerprint(self) -> Fingerprint:
        return msgspec.structs.replace(self.engine.fingerprint, direction=self.settings.direction)

    def _heartbeat(self) -> None:
        self.timers.after(HEARTBEAT, "heartbeat", self._heartbeat)
        self.registration.beat(standing(self))

    @property
    def fault_count(self) -> int:
        return self.faults + len(self.ledger.faults)

    @property
    def malformed(self) -> int:
        return self.listener.malformed + self.registration.link.malformed

    def _inspected(self, seq: int, page: int | None) -> Inspected:
        if page is not None:
            return Inspected(seq, [], {**identity(self), **self.ownership.about(page)})
        return Inspected(seq, worker_samples(self) + self.samples(), state_of(self))

    # ------------------------------------------------------------ stopping

    def _asked_to_stop(self, number: int, frame: object) -> None:
        if self.draining:
            self.drain_until = 0.0  # asked twice: do not wait
        else:
            self.draining = True
            self.drain_until = time.monotonic() + self.settings.drain_timeout

    def _finished(self) -> bool:
        worn = None if self.draining else worn_out(self.ledger, self.settings.max_retained, self.used_up())
        if worn is not None:
            log.error("%s: draining, for a restart", worn)
            self.exit_code = EXIT_RETAINED
            self._asked_to_stop(0, None)
        busy = self.legs or self.legs.outbox
        if not self.draining or (busy and time.monotonic() < self.drain_until):
            return False
        for leg in list(self.legs.by_rid.values()):
            self.give_up(leg, "failed", 503, f"{self.settings.name} is shutting down")
        self.legs.flush(time.monotonic())
        return True

    def close(self) -> None:
        self.thread.stop()
        self.compiler.stop()
        self.registration.close()
        self.listener.close(linger_ms=LAST_WORDS_MS)
        self.authenticator.stop()
        self.context.term()
