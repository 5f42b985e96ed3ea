"""Connections of the posting side: dialled, shown to be the lender that HELLO named, kept up until they are ended."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import time
from abc import abstractmethod

import msgspec
import numpy as np

from quiesce.transfer import attach as wire
from quiesce.transfer.agent import Engine, Far
from quiesce.transfer.agent_target import Target
from quiesce.transfer.couriers import Courier, CourierOwner, Joined, Told
from quiesce.transfer.interface import Arena, Peer, PeerLost
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

RETRY_FIRST, RETRY_MOST = 0.05, 2.0  # seconds
MAX_COURIERS = 8  # of one connection: each but one waits for posts of an ended attachment
MAX_LOST = 4096  # connections that were ended with something lost

_DescriptorDecoder = msgspec.msgpack.Decoder(wire.Descriptor)


class Connections(CourierOwner):
    def __init__(self, watch: Watch, told: Told, engine: Engine, max_peers: int) -> None:
        self._watch, self._told, self._engine, self._max_peers = watch, told, engine, max_peers
        self._arena: Arena | None = None
        self._targets: dict[int, Target] = {}  # by Peer.number; leaves when over and nothing is open
        self._by_courier: dict[Courier, Target] = {}
        self._parting: dict[Courier, wire.Line] = {}  # lines of attachments that are over, for the last word on them
        self._last_number = 0
        self.undrained_through = 0  # of what was forgotten up to this number it is known only that it never drained
        self.lost_peers: list[PeerLost] = []

    def use(self, arena: Arena) -> None:
        self._arena = arena

    @abstractmethod
    def drop_waiting(self, target: Target) -> None:
        """What was never handed to its courier is over."""

    def tidy(self, target: Target) -> None:
        """A connection that was ended with something lost stays, for it must never be said to be drained: so many of
        them each by itself, what is older by the highest of their numbers."""
        if not target.over or target.open_posts or target.couriers:
            return
        if not target.unproven:
            self._targets.pop(target.peer.number, None)
            return
        lost = [number for number, each in self._targets.items() if each.over and each.unproven]
        for number in lost[: max(0, len(lost) - MAX_LOST)]:
            if not self._targets[number].open_posts and not self._targets[number].couriers:
                del self._targets[number]
                self.undrained_through = max(self.undrained_through, number)

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        if self._arena is None:
            raise ValueError("register an arena before connecting")
        lender = self._read(descriptor)
        for known in self._targets.values():
            if known.lender == lender and known.own_epoch == own_epoch and not known.over:
                return known.peer
        if sum(not target.over for target in self._targets.values()) >= self._max_peers:
            raise ValueError(f"{self._max_peers} connections are open already")
        self._last_number += 1
        target = Target(Peer(lender.epoch, self._last_number), own_epoch, lender)
        self._targets[target.peer.number] = target
        self._dial(target)
        return target.peer

    def _read(self, descriptor: bytes) -> wire.Descriptor:
        assert self._arena is not None
        label = self._engine.caps.label
        try:
            lender = _DescriptorDecoder.decode(descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"not the descriptor of {label}: {error}") from error
        if lender.kind != label:
            raise ValueError(f"the peer moves pages by {lender.kind}, this worker by {label}")
        wire.check_address(lender.address)
        if lender.page_bytes != self._arena.page_bytes:
            raise ValueError(f"pages of {lender.page_bytes} bytes there, {self._arena.page_bytes} here")
        if not 1 <= lender.pages < 2**31:
            raise ValueError(f"a lender cannot have {lender.pages} pages")
        return lender

    def disconnect(self, peer: Peer) -> None:
        target = self._targets.get(peer.number)
        if target is not None and not target.over:
            self._give_up(target)

    def _give_up(self, target: Target) -> None:
        target.over, target.retry_at = True, None
        self._detach(target)
        self.tidy(target)

    def _dial(self, target: Target) -> None:
        target.retry_at = None
        try:
            line = wire.dial(target.lender.address)
        except ConnectionRefusedError:
            self._on_lost(target, "no process listens at its address", final=True)
            return
        except OSError as error:
            self._on_lost(target, f"it cannot be reached: {error}", final=False)
            return
        target.line, target.connecting = line, True
        target.deadline = time.monotonic() + wire.ATTACH_SECONDS
        self._watch.add(line.fileno(), lambda: self._on_line(target, line))
        self._watch.want_writable(line.fileno(), True)

    def _on_line(self, target: Target, line: wire.Line) -> None:
        if target.line is not line:
            return
        try:
            if target.connecting:
                failed = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    refused = failed == errno.ECONNREFUSED
                    self._on_lost(target, f"it cannot be reached: error {failed}", final=refused)
                    return
                target.connecting, target.challenge = False, secrets.token_bytes(16)
                self._watch.want_writable(line.fileno(), False)
                line.say(wire.Greet(target.own_epoch, target.challenge))
            for packet in line.hear():
                if target.line is line:
                    self._step(target, line, packet)
        except wire.Closed as error:
            self._on_lost(target, str(error), final=False)
        except wire.Malformed as error:
            self._on_lost(target, f"it broke the handshake: {error}", final=False)

    def _step(self, target: Target, line: wire.Line, packet: wire.Packet) -> None:
        token = target.lender.token
        match packet:
            case wire.Challenge(proof=proof, challenge=challenge) if target.challenge:
                if not hmac.compare_digest(proof, wire.prove(token, "lender", target.challenge, challenge)):
                    self._on_lost(target, "another process answers at its address", final=True)
                    return
                line.say(wire.Answer(wire.prove(token, "poster", challenge, target.challenge)))
                target.challenge = b""
            case wire.Lent() as lent if target.courier is None and not target.challenge:
                assert self._arena is not None
                pages, page_bytes = target.lender.pages, target.lender.page_bytes
                joined = Joined(
                    Far(lent.agent, lent.base, lent.scratch, pages, page_bytes), lent.trial, lent.generation
                )
                courier = Courier(self._engine, self._arena, self._told, self, joined)
                target.courier, target.generation = courier, lent.generation
                target.couriers[courier] = set()
                target.busy = np.zeros(max(pages, self._arena.count), bool)
                self._by_courier[courier] = target
                self._settled_over_there(target, lent.ended)
            case wire.Settled(ended=ended) if target.courier is not None:
                self._settled_over_there(target, ended)
            case wire.Refused(reason=reason, final=final):
                self._on_lost(target, f"it refuses: {reason}", final)
            case other:
                raise wire.Malformed(f"unexpected {type(other).__name__}")

    def _settled_over_there(self, target: Target, ended: int) -> None:
        """The lender has ended agents of earlier attachments. What was read through one ends with our own."""
        target.ended = max(target.ended, ended)
        living = {courier.generation for courier in target.couriers}
        for generation in [generation for generation in target.unproven if generation <= target.ended]:
            if generation in living:
                target.unproven[generation] = False
            else:
                del target.unproven[generation]

    def _on_lost(self, target: Target, reason: str, final: bool) -> None:
        if target.over:
            return
        if target.attached or final:
            self.lost_peers.append(PeerLost(target.peer.epoch, target.generation, reason, final))
        settled = target.attached
        self._detach(target)
        if final:
            self._give_up(target)
            return
        target.tries = 0 if settled else target.tries + 1
        target.retry_at = time.monotonic() + min(RETRY_MOST, RETRY_FIRST * 2 ** min(target.tries, 10))

    def _detach(self, target: Target) -> None:
        """The attachment is over: its courier ends once what is under way has; what never started is over now."""
        if target.line is not None:
            self._watch.remove(target.line.fileno())
            self._let_go(target, target.line)
        target.line, target.attached, target.connecting, target.deadline = None, False, False, None
        if target.courier is not None:
            target.courier.end()
        target.courier, target.challenge = None, b""
        self.drop_waiting(target)

    def _let_go(self, target: Target, line: wire.Line) -> None:
        if target.courier is not None and target.attached:
            with contextlib.suppress(wire.Closed):
                line.say(wire.Detached())
                self._parting[target.courier] = line
                return
        line.close()

    def last_word(self, courier: Courier, all_arrived: bool) -> None:
        """Its agent is no more, or cannot be said to be."""
        line = self._parting.pop(courier, None)
        if line is None:
            return
        if all_arrived:
            with contextlib.suppress(wire.Closed):
                line.say(wire.Ended())
        line.close()

    def tick(self, now: float) -> None:
        for target in list(self._targets.values()):
            if target.retry_at is not None and target.retry_at <= now and len(target.couriers) < MAX_COURIERS:
                self._dial(target)
            elif target.deadline is not None and target.deadline <= now:
                self._on_lost(target, "the handshake takes too long", final=False)

    def next_deadline(self) -> float | None:
        due = [
            t.retry_at for t in self._targets.values() if t.retry_at is not None and len(t.couriers) < MAX_COURIERS
        ]
        due += [t.deadline for t in self._targets.values() if t.deadline is not None]
        return min(due, default=None)

    def joined(self, courier: Courier) -> None:
        target = self._by_courier[courier]
        if target.courier is not courier or target.line is None:
            return
        try:
            target.line.say(wire.Attached(target.generation))
        except wire.Closed as error:
            self._on_lost(target, str(error), final=False)
            return
        target.attached, target.deadline, target.tries = True, None, 0
