"""Prefill's half of a pull: computes what decode asks for, lends the pages, takes them back on its proof."""

from __future__ import annotations

import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

from quiesce.core.admission import pages_for
from quiesce.core.closed_set import Ids
from quiesce.core.lending import End, PeerLost, Revoked, State, Transfer
from quiesce.core.machine import Action, Arm, Closed, Fired, Heard, Lost, Opened, Revoke, Send, Timer
from quiesce.core.messages import Drained, Failed, FirstToken, HandOff, Leg, Ping, TransferId
from quiesce.core.pull_lender import Event as LenderEvent
from quiesce.core.pull_lender import PullLender
from quiesce.core.pulling import COMPUTING, Computed, ReaderUp
from quiesce.core.records import LENDER_GONE
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.prefill import Job, PrefillWorker
from quiesce.roles.report import Standing
from quiesce.roles.revoking import Revoking, spoken
from quiesce.roles.sequence import Sequence
from quiesce.roles.silence import ATTACH_LEAST, Silence

LEASE_MOST, LEASE_LEAST = 10.0, 3.0  # seconds; PINGs come every second
SILENCE_POLL = 30.0  # seconds


class PullPrefillWorker(PrefillWorker):
    def machine(self) -> None:
        caps, hold = self.transport.caps, self.settings.hold_timeout
        self.lender = PullLender(
            self.epoch,
            self.ledger,
            expiry=self.settings.on_hold_expiry,
            costly_fence=caps.fence_cost == "disrupts_all",
            page_fence=caps.fence == "page",
            lease_ms=int(1000 * max(LEASE_LEAST, min(LEASE_MOST, hold))),
        )
        self.revoking = Revoking(self.transport, self.timers, self.tell)
        self.unattached: dict[TransferId, tuple[Job, FirstToken, float]] = {}  # computed; its reader is not there yet
        self.lent: dict[TransferId, int] = {}  # generation that the transport lets its reader in under
        self._probe_ids = Ids(secrets.randbits(64) | 1)
        self.silence = Silence()
        self._given_up = False  # what is being heard is decode's word that it gave up
        self._forget_silent()

    # ------------------------------------------------------------ where it differs from push

    def probe(self, leg: WorkerLeg) -> bool:
        """Through pages, batch and engine: nothing is lent where nobody reads."""
        tid = self._probe_ids.next
        pages = self.ledger.own(tid, pages_for(len(leg.start.token_ids), self.settings.page_size))
        if pages is None:
            return False
        self._probe_ids.mint()
        sequence = self.sequence(leg, tid)
        sequence.pages = array("i", pages)
        self.by_tid[tid] = Job(Leg(tid, 0, 0, self.epoch), leg.start.room, leg, sequence)
        self.batch.add(sequence)
        return True

    def peer_up(self, epoch: int) -> bool:
        self.silence.heard(epoch)
        self.tell(ReaderUp(epoch))
        return epoch in self.lender.lenders

    def asked(self, leg: Leg) -> Transfer:
        return self.lender.transfers[leg.tid]

    def compare(self, leg: Leg, pairing: bytes) -> bool:
        """The core compares again, with what was computed, before it lends anything."""
        transfer = self.lender.transfers[leg.tid]
        if transfer.pairing != pairing:
            self.fault(leg, f"pairing: room {transfer.room} was asked for with another prompt")
        return leg.tid in self.lender.transfers and transfer.state is COMPUTING

    def fault(self, leg: Leg, reason: str) -> None:
        self.tell(End(leg.tid, reason))

    def ready(self, job: Job, sequence: Sequence, first: FirstToken | None) -> None:
        """Nothing is lent before all of it is computed (guard L1)."""
        if sequence.probe:
            if first is not None and job.request is not None:
                del self.by_tid[sequence.tid]
                self.ledger.end(sequence.tid)
                self.say_end(job.request, "handed_over")
        elif first is not None:
            self.unattached[job.leg.tid] = (job, first, time.monotonic())
            self._lend_waiting()

    def schedule(self) -> None:
        self._lend_waiting()
        super().schedule()

    def _lend_waiting(self) -> None:
        for tid, (job, first, since) in list(self.unattached.items()):
            waited = time.monotonic() - since
            generation = self.transport.lend(tid.epoch, self.ledger.pages(tid), access="read")
            if generation is not None:
                del self.unattached[tid]
                self.lent[tid] = generation
                self._lend(job, first, generation)
            elif waited > max(ATTACH_LEAST, self.settings.hold_timeout):
                self.fault(job.leg, f"decode has not attached to read it for {waited:.1f} s")

    def _lend(self, job: Job, first: FirstToken, generation: int) -> None:
        request = job.request
        assert request is not None
        job.began()
        remaining = request.arrived + request.start.deadline_ms / 1000 - time.monotonic()
        self.tell(
            Computed(
                job.leg.tid,
                request.pairing(self.engine.fingerprint.model),
                len(request.start.token_ids),
                self.region.id,
                generation,
                max(1, int(remaining * 1000)),
                first,
            )
        )

    # ------------------------------------------------------------ the machine

    def tell(self, event: LenderEvent) -> None:  # type: ignore[override]  # the other machine's events
        with self.watchers:
            self.carry_out(self.lender.on(event))

    def hear(self, message: HandOff | Ping, speaker: int) -> None:
        self.silence.heard(speaker)
        self._given_up = isinstance(message, Failed | Drained | Ping)
        try:
            self.tell(Heard(message, speaker))
        finally:
            self._given_up = False

    def act(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self.peers.send(to, message)
            case Arm():
                self.timers.arm(action)
            case Opened(leg):
                self._opened(leg)
            case Revoke():
                self.revoking.ask(action)
            case Lost(tid, reason):
                self._ended(tid, lambda leg: self.stopped(leg, reason, "given up" if self._given_up else "failed"))
                self._hasten(tid.epoch)
            case Closed(tid):
                self.timers.forget(tid)
                if (generation := self.lent.pop(tid, None)) is not None:
                    self.transport.withdraw(tid.epoch, generation)
                self._ended(tid, lambda leg: self.stopped(leg, "done", "done"))  # else it was lost before
            case _:
                raise AssertionError(f"a lender of source pages does not ask for {action}")

    def _ended(self, tid: TransferId, say: Callable[[Leg], None]) -> None:
        self.unattached.pop(tid, None)
        for leg in [leg for leg in self.by_leg if leg.tid == tid]:
            say(leg)

    # ------------------------------------------------------------ readers

    def transport_turn(self) -> None:
        self.transport.poll()
        for event in self.transport.events():
            if event.final:
                self._guarded(self.peer_gone, event.peer_epoch)
            else:
                self._guarded(self._detached, event.peer_epoch)
        self.revoking.turn()

    def _detached(self, epoch: int) -> None:
        """What read for it may be dead while its engine lives: those grants are over then, and it attaches anew."""
        proof = self.transport.gone(epoch)
        if proof is not None:
            self.tell(Revoked(spoken(proof)))
        self._hasten(epoch)

    def _hasten(self, epoch: int) -> None:
        """Who is not attached is not waited for: what it was lent, and has been given up, is fenced now."""
        if self.transport.generation(epoch) is not None:
            return
        for tid, transfer in list(self.lender.transfers.items()):
            if tid.epoch == epoch and transfer.state is State.HOLDING:
                self.tell(Fired(Timer.REFENCE, tid, 0))

    def _forget_silent(self) -> None:
        self.timers.after(SILENCE_POLL, "silence", self._forget_silent)
        owing = [tid.epoch for tid in self.lender.transfers]
        for epoch in self.silence.gone(lambda epoch: self.transport.generation(epoch) is not None, owing):
            self.peer_gone(epoch)

    def peer_gone(self, epoch: int) -> None:
        self.silence.forget(epoch)
        self.tell(PeerLost(epoch, LENDER_GONE))
        self.forget(epoch)

    # ------------------------------------------------------------ looking

    def standing(self) -> Standing:
        lender = self.lender
        ended = {"done": lender.ended["committed"], "failed": lender.ended.total() - lender.ended["committed"]}
        return Standing(len(lender.transfers) + len(lender.tombstones), ended, 0, lender.stale)

    def machine_tables(self) -> dict[str, Any]:
        states = Counter(transfer.state.value for transfer in self.lender.transfers.values())
        return {
            "transfers": dict(states),
            "tombstones": len(self.lender.tombstones),
            "unattached": len(self.unattached),
            "revoking": len(self.revoking),
        }
