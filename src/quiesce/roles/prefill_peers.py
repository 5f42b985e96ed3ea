"""A decode worker's sessions with prefill workers: one link per peer epoch, opened when a request first names it."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from quiesce.channel import KeyPair, Link, LinkEvent
from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Address, Unwelcome, Welcome, Wire
from quiesce.core.session import Handshake
from quiesce.roles.silence import ATTACH_LEAST, PAUSE

log = logging.getLogger("quiesce.sessions")

HELLO_FIRST, HELLO_MOST = 0.1, 2.0  # seconds between repeats of HELLO
UNREACHABLE = 3.0  # seconds without a connection; a new peer that is there and silent has the hold timeout
INBOX_ROUNDS = 32  # after a pause: more than the channel's queues hold is heard, before any timer
MAX_PEERS = 256  # links, those that lead nowhere included


class NoLink(Exception):
    """No link to that address can be opened. `status` is what the request ends with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class PrefillPeer:
    address: Address
    link: Link
    handshake: Handshake
    opened: float
    hello_at: float = 0.0
    hellos: int = 0
    ready_at: float = 0.0  # when it could last be given an offer
    down_at: float | None = None  # since when its connection is known to be none
    refusal: str | None = None  # why it will never do

    @property
    def taken(self) -> bool:
        return self.handshake.peer == self.address.epoch


class Ends(Protocol):
    """What a session attaches: the transport that lends (push), or the connections of the one that reads (pull)."""

    def descriptor(self, peer_epoch: int) -> bytes:
        """For HELLO."""

    def settle(self, peer_epoch: int, reply: bytes) -> None:
        """What WELCOME said to it. Raises ValueError for what does not fit."""

    def generation(self, peer_epoch: int) -> int | None:
        """None: not attached, so nothing can be asked of that peer yet."""


class PrefillPeers:
    """A peer is ready once it is taken and the transport has a generation for it, so that a grant can be made. One
    that is not, or not any more, gets HELLO again, each time with the descriptor that the transport has for it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        poller: zmq.Poller,
        keys: KeyPair,
        epoch: int,
        fingerprint: Fingerprint,
        ends: Ends,
        patience: float,
    ) -> None:
        """`patience`: seconds in which a peer that was reached must answer."""
        self._context = context
        self._poller = poller
        self._keys = keys
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._ends = ends
        self._patience = patience
        self.peers: dict[int, PrefillPeer] = {}
        self._turned = time.monotonic()

    def reach(self, address: Address) -> PrefillPeer:
        """Raises NoLink for an address that means nothing, and when there are too many links already."""
        peer = self.peers.get(address.epoch)
        if peer is None:
            if len(self.peers) >= MAX_PEERS:
                raise NoLink(503, f"{MAX_PEERS} links to prefill workers are open already, dead ones included")
            try:
                link = Link(self._context, address.endpoint, address.public_key, self._keys)
            except (zmq.ZMQError, ValueError) as error:
                raise NoLink(400, f"the address of prefill {address.name} cannot be used: {error}") from error
            handshake = Handshake(self._epoch, 0, self._fingerprint, lambda: secrets.randbits(63))
            peer = self.peers[address.epoch] = PrefillPeer(address, link, handshake, time.monotonic())
            self._poller.register(link.socket, zmq.POLLIN)
            self._poller.register(link.monitor, zmq.POLLIN)
        return peer

    def ready(self, peer: PrefillPeer) -> bool:
        if not (peer.taken and self._ends.generation(peer.address.epoch) is not None):
            return False
        peer.ready_at = time.monotonic()
        peer.hellos = min(peer.hellos, 1)  # should it be lost, it is greeted without delay
        return True

    def hopeless(self, peer: PrefillPeer) -> str | None:
        """Why requests should stop waiting for this peer, or None."""
        if peer.refusal is not None:
            return f"prefill {peer.address.name} refused the session: {peer.refusal}"
        now = time.monotonic()
        waited = now - peer.opened
        unreached = 0.0 if peer.down_at is None else now - peer.down_at
        if not peer.taken and (unreached > UNREACHABLE or waited > self._patience):
            return f"prefill {peer.address.name} did not answer within {waited:.1f} s"
        unattached = now - max(peer.opened, peer.ready_at)
        if peer.taken and not self.ready(peer) and unattached > max(ATTACH_LEAST, self._patience):
            return f"prefill {peer.address.name} has not attached to write here for {unattached:.1f} s"
        return None

    def forget_hopeless(self, wanted: set[int]) -> None:
        """Drops links that lead nowhere and that nobody waits for; a request that names one again tries anew."""
        for epoch, peer in list(self.peers.items()):
            if epoch not in wanted and not peer.taken and self.hopeless(peer) is not None:
                self.drop(epoch)

    def send(self, epoch: int, message: Wire) -> bool:
        """False when that epoch is gone or its queue is full: the protocol repeats."""
        peer = self.peers.get(epoch)
        return peer is not None and peer.link.send(message)

    def turn(self) -> tuple[list[tuple[int, Wire]], list[int]]:
        """(messages with the epoch that spoke them, epochs whose process has gone)."""
        heard: list[tuple[int, Wire]] = []
        lost: list[int] = []
        before, self._turned = self._turned, time.monotonic()
        rounds = 1
        if self._turned - before > PAUSE:
            rounds = INBOX_ROUNDS
            self._was_away(self._turned - before)
        for epoch, peer in list(self.peers.items()):
            for _ in range(rounds):
                messages = peer.link.receive()
                if not messages:
                    break
                for message in messages:
                    if not self._session(peer, message) and peer.taken:
                        heard.append((epoch, message))
            was_up = peer.link.is_up
            for change in peer.link.state_changes():
                if change is LinkEvent.DOWN and (was_up or peer.taken):
                    lost.append(epoch)
                    log.warning("prefill %s is gone", peer.address.name, extra={"peer_epoch": f"{epoch:016x}"})
                    break
                was_up = was_up or change is LinkEvent.UP
            else:
                # One that was stopped in the middle of a handshake breaks it off when it goes on, and is there again.
                peer.down_at = (peer.down_at or self._turned) if peer.link.is_down else None
                self._greet(peer)
                continue
            self.drop(epoch)
        return heard, lost

    def _was_away(self, seconds: float) -> None:
        """In that time nobody could be reached, and nobody's answer be heard: it counts for none of them."""
        for peer in self.peers.values():
            peer.opened = min(peer.opened + seconds, self._turned)
            if peer.down_at is not None:
                peer.down_at = min(peer.down_at + seconds, self._turned)

    def _session(self, peer: PrefillPeer, message: Wire) -> bool:
        if isinstance(message, Welcome):
            if message.epoch != peer.address.epoch:
                peer.refusal = f"another process ({message.epoch:016x}) answers at its address"
                return True
            if (differs := self._fingerprint.difference(message.fingerprint)) is not None:
                peer.refusal = differs
                return True
            anew = not peer.taken
            confirm = peer.handshake.on_welcome(message)
            if confirm is not None:
                try:
                    self._ends.settle(message.epoch, message.descriptor)
                except ValueError as error:
                    peer.refusal = f"transfer engine: {error}"
                    return True
                peer.link.send(confirm)
                if anew:
                    said = {"peer_epoch": f"{message.epoch:016x}"}
                    log.info("session with prefill %s", peer.address.name, extra=said)
            return True
        if isinstance(message, Unwelcome):
            peer.refusal = message.reason
            said = {"peer_epoch": f"{peer.address.epoch:016x}"}
            log.warning("prefill %s refuses a session: %s", peer.address.name, message.reason, extra=said)
            return True
        return False

    def _greet(self, peer: PrefillPeer) -> None:
        """HELLO again until the peer is taken and its mover has attached."""
        now = time.monotonic()
        if not peer.link.is_up or peer.refusal is not None or now < peer.hello_at or self.ready(peer):
            return
        peer.hello_at = now + min(HELLO_MOST, HELLO_FIRST * 2 ** min(peer.hellos, 8))
        peer.hellos += 1
        peer.link.send(peer.handshake.hello(self._ends.descriptor(peer.address.epoch)))

    def drop(self, epoch: int) -> None:
        peer = self.peers.pop(epoch, None)
        if peer is not None:
            self._poller.unregister(peer.link.socket)
            self._poller.unregister(peer.link.monitor)
            peer.link.close()

    def close(self) -> None:
        for epoch in list(self.peers):
            self.drop(epoch)
