"""The decode worker: lends pages to prefill, commits what landed, and runs the answer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import zmq

from quiesce.core.admission import pages_for
from quiesce.core.lender import End, Lender, PeerLost, Publish, Verified
from quiesce.core.lender import Event as LenderEvent
from quiesce.core.machine import Action, Arm, Closed, Committed, Fired, Heard, Lost, Revoke, Send, Verify
from quiesce.core.messages import Await, HandOff, Ping, Pong, Reached, Sample, TransferId
from quiesce.core.pull_reader import Event as ReaderEvent
from quiesce.core.pull_reader import PullReader
from quiesce.engine.engine import Engine
from quiesce.engine.sampler import Sampled
from quiesce.roles.answering import AnsweringWorker
from quiesce.roles.late import Asking
from quiesce.roles.legs import WorkerLeg, loss_of
from quiesce.roles.null_peers import NullPrefill
from quiesce.roles.prefill_peers import Ends, NoLink, PrefillPeers
from quiesce.roles.proving import check_transport
from quiesce.roles.report import generation_samples, lender_samples
from quiesce.roles.revoking import Revoking
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.timers import AT_ONCE
from quiesce.transfer.interface import Transport

log = logging.getLogger("quiesce.decode")

PING_SECONDS = 1.0
DEADLINE_SKEW = 0.25  # seconds by which the two legs of a request may differ about its deadline


class DecodeWorker(AnsweringWorker):
    role = "decode"

    def __init__(self, settings: WorkerSettings, engine: Engine, transport: Transport) -> None:
        check_transport(transport.caps, settings)
        super().__init__(settings, engine)
        self.transport, self.caps = transport, transport.caps
        self.picks, self.used_up = transport.picks, transport.used_up
        self.region = transport.register(engine.kv.arena)
        self.poller.register(transport.fileno(), zmq.POLLIN)
        self.lender = self.machine(transport)
        self.peers = PrefillPeers(
            self.context,
            self.poller,
            self.keys,
            self.epoch,
            self.fingerprint(),
            self.ends(transport),
            settings.hold_timeout,
        )
        self.received = 0  # prompt tokens that came over hand-offs
        self.asking = Asking(lambda epoch, room: self.peers.send(epoch, Await(room)))
        self.revoking = Revoking(transport, self.timers, self.tell)
        self.lent: dict[TransferId, tuple[int, int]] = {}  # what the transport lets whom touch: epoch, generation
        self.null = NullPrefill(self.epoch)
        self.timers.after(PING_SECONDS, "ping", self._ping)

    # ------------------------------------------------------------ what pull has otherwise

    def machine(self, transport: Transport) -> Lender | PullReader:
        return Lender(
            self.epoch,
            self.ledger,
            expiry=self.settings.on_hold_expiry,
            costly_fence=transport.caps.fence_cost == "disrupts_all",
            page_fence=transport.caps.fence == "page",
        )

    def ends(self, transport: Transport) -> Ends:
        """What a session with a prefill worker attaches."""
        return transport

    def begin(self, tid: TransferId, prefill: int, remaining_ms: int) -> None:
        """It has its pages: the transfer begins."""
        if prefill == self.null.epoch:
            generation: int | None = self.null.generation
        else:
            generation = self.transport.lend(prefill, self.ledger.pages(tid))
            if generation is None:  # it was attached when its turn came, and has ended since
                self.tell(End(tid, "the prefill engine is not attached any more"))
                return
            self.lent[tid] = (prefill, generation)
        assert generation is not None
        self.tell(Publish(tid, 0, self.region.id, generation, remaining_ms))

    def probe(self, leg: WorkerLeg) -> bool:
        """A test request begins. False: there is no room for it."""
        return self._offer(leg, self.null.epoch)

    def reading(self) -> tuple[int, ...]:
        """Seqs whose lease at the source a PING renews."""
        return ()

    def reads(self) -> Counter[str]:
        """Of pull: reads that ended UNKNOWN (`taints`), and what the sources said after landing."""
        return Counter()

    def transport_turn(self) -> None:
        for event in self.transport.events():
            self._guarded(
                self.tell, PeerLost(event.peer_epoch, f"the prefill engine's mover is gone: {event.reason}")
            )

    def source_gone(self, epoch: int, reason: str) -> None:
        self.tell(PeerLost(epoch, reason))

    # ------------------------------------------------------------ legs

    def start(self, leg: WorkerLeg) -> None:
        if leg.start.probe:
            if not self.probe(leg):
                self.say_end(leg, "refused", 503, "there is no room for a test request")
            return
        if leg.start.local:
            if self.settings.strict_disaggregation:
                self.say_end(leg, "refused", 400, "this decode worker computes no prompts (--strict-disaggregation)")
            else:
                self.waiting.append(leg)
            return
        if leg.start.prefill is None:
            self.say_end(leg, "refused", 400, "a decode leg must name its prefill worker")
            return
        try:
            self.peers.reach(leg.start.prefill)
        except NoLink as error:
            self.say_end(leg, "refused", error.status, str(error))
            return
        self.waiting.append(leg)

    def give_up(self, leg: WorkerLeg, outcome: Literal["cancelled", "failed"], status: int, reason: str) -> None:
        super().give_up(leg, outcome, status, reason)
        self.asking.forget(leg.start.room)

    def local(self, pages: int) -> TransferId | None:
        return self.lender.local(pages)

    def release(self, tid: TransferId, reason: str) -> None:
        """The request's hold on the pages ends: through the transfer while there is one, else at the ledger."""
        if tid in self.lender.transfers:
            self.tell(End(tid, reason))
        else:
            self.ledger.end(tid)

    def schedule(self) -> None:
        """Offers in order of arrival. Who waits for a peer lets others pass; who waits for pages does not."""
        self.peers.forget_hopeless({leg.start.prefill.epoch for leg in self.waiting if leg.start.prefill})
        self.generation.resume()
        moved = len(self.waiting)
        for leg in sorted(self.waiting, key=lambda leg: leg.start.priority):
            if moved - len(self.waiting) >= AT_ONCE:
                return self.timers.soon()
            address = leg.start.prefill
            if address is None:
                if not self.begin_local(leg):
                    return
                continue
            peer = self.peers.peers.get(address.epoch)
            hopeless = "its prefill worker is gone" if peer is None else self.peers.hopeless(peer)
            if hopeless is not None:
                self.unpaired += 1
                self.say_end(leg, "failed", 503, hopeless, fault="peer")
                self.give_up(leg, "failed", 503, hopeless)
            elif peer is not None and self.peers.ready(peer) and self._turn_of(leg, address.epoch):
                if not self._offer(leg, address.epoch):
                    return
                self.asking.forget(leg.start.room)

    def _turn_of(self, leg: WorkerLeg, prefill: int) -> bool:
        return self.settings.reserve == "early" or self.asking.may_offer(prefill, leg.start.room)

    def _offer(self, leg: WorkerLeg, prefill: int) -> bool:
        """Reserves and offers; False when the pool has no room for it now."""
        if not leg.start.probe and not self.generation.fits(leg):
            return False
        tokens = len(leg.start.token_ids)
        tid = self.lender.reserve(
            {0: prefill},
            room=leg.start.room,
            pairing=leg.pairing(self.engine.fingerprint.model),
            tokens=tokens,
            pages=pages_for(tokens, self.settings.page_size),
        )
        if tid is None:
            return False
        self.generation.admit(leg, tid)
        if not leg.start.probe:
            self.waiting.remove(leg)
        remaining = leg.arrived + leg.start.deadline_ms / 1000 - time.monotonic()
        self.begin(tid, prefill, max(1, int(remaining * 1000)))
        return True

    # ------------------------------------------------------------ the machine

    def tell(self, event: LenderEvent | ReaderEvent) -> None:
        on: Callable[[Any], list[Action]] = self.lender.on
        with self.watchers:
            self.carry_out(on(event))

    def act(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self.holds.said(message)
                if to == self.null.epoch:
                    self._probed(message)
                else:
                    self.peers.send(to, message)
            case Arm():
                self.timers.arm(action)
            case Revoke():
                self.revoking.ask(action)
            case Verify(tid, _):
                # Digests are not negotiated by this version: a peer that sends one is not trusted to be right.
                self.tell(Verified(tid, False, frozenset(self.peers.peers)))
            case Committed(tid, result):
                self.timers.forget(tid)
                self._withdraw(tid)
                self.transport.consume_barrier(self.ledger.pages(tid))
                leg = self.generation.by_tid[tid]
                leg.cached_tokens = result.cached_tokens
                leg.transfer_began, leg.transfer_ended = leg.left_queue, time.monotonic()
                self.received += 0 if leg.start.probe else len(leg.start.token_ids)
                sequence = self.generation.sequence(tid, computed=len(leg.start.token_ids))
                sequence.landed = tuple(sequence.pages)
                self.generation.take(sequence, Sampled(result.token, result.logprob))
            case Lost(tid, reason):
                self._lost(tid, reason)
            case Closed(tid):
                self.timers.forget(tid)
                self._withdraw(tid)
            case _:
                raise AssertionError(f"a lender does not ask for {action}")

    def _probed(self, message: HandOff | Ping) -> None:
        """To the probe's other half, which answers at once."""
        self.null.hear(message)
        while self.null.said:
            self.tell(Heard(self.null.said.popleft(), self.null.epoch))

    def _withdraw(self, tid: TransferId) -> None:
        """Every lease on it is closed: whoever touches its pages now has no right to."""
        lent = self.lent.pop(tid, None)
        if lent is not None:
            self.transport.withdraw(*lent)

    def _lost(self, tid: TransferId, reason: str) -> None:
        leg = self.generation.by_tid.get(tid)
        self.generation.leave(tid)
        if leg is not None:
            self.transfers_failed += not leg.start.probe
            # Both legs have the request's deadline, and prefill's clock may be the first to say so.
            due = time.monotonic() > leg.arrived + leg.start.deadline_ms / 1000 - DEADLINE_SKEW
            status, fault = loss_of(reason, due)
            self.say_end(leg, "failed", status, f"the hand-off failed: {reason}", fault)

    def fire(self, payload: object) -> None:
        assert isinstance(payload, Fired)
        self.tell(payload)

    # ------------------------------------------------------------ peers

    def peers_turn(self) -> None:
        heard, lost = self.peers.turn()
        for speaker, message in heard:
            if isinstance(message, HandOff):
                self.holds.heard(message)
                self._guarded(self.hear, message, speaker)
            elif isinstance(message, Reached):
                self.asking.reached(message.room)
            elif not isinstance(message, Pong):
                log.warning("%s from prefill %016x is not for a decode worker", type(message).__name__, speaker)
        self.transport_turn()
        for epoch in lost:
            self._guarded(self.source_gone, epoch, "the prefill engine is gone")
        self.revoking.turn()

    def hear(self, message: HandOff, speaker: int) -> None:
        self.tell(Heard(message, speaker))

    def _ping(self) -> None:
        self.timers.after(PING_SECONDS, "ping", self._ping)
        counter, high, open_seqs = self.lender.closed_set()
        ping = Ping(self.epoch, 0, self.thread.steps, counter, high, open_seqs, self.reading())
        for peer in self.peers.peers.values():
            if peer.taken:
                peer.link.send(ping)
        self._probed(ping)

    # ------------------------------------------------------------ looking and leaving

    def samples(self) -> list[Sample]:
        return lender_samples(self) + generation_samples(self.generation)

    def tables(self) -> dict[str, Any]:
        states: dict[str, int] = {}
        for transfer in self.lender.transfers.values():
            states[transfer.state.value] = states.get(transfer.state.value, 0) + 1
        return {
            **super().tables(),
            "asking": len(self.asking),
            "transfers": states,
            "transfers_ended": dict(self.lender.ended),
            "peers": {peer.address.name: f"{epoch:016x}" for epoch, peer in self.peers.peers.items()},
            "revoking": len(self.revoking),
            "transport": self.transport.report(),
            "stale": self.lender.stale,
        }

    def close(self) -> None:
        self.peers.close()
        self.transport.close_all()
        super().close()


def run(settings: WorkerSettings) -> int:
    from quiesce.roles.assembly import make_engine, make_transport, make_worker  # noqa: PLC0415  (torch loads here)

    engine = make_engine(settings)
    return make_worker(settings, engine, make_transport(settings)).run()
