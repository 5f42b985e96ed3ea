"""A prefill worker's sessions with decode workers, over its one control socket."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quiesce.channel import Listener, Received
from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Confirm, HandOff, Hello, Ping, Pong, Unwelcome, Welcome, Wire
from quiesce.core.session import Handshake
from quiesce.transfer.interface import Peer, Transport

log = logging.getLogger("quiesce.sessions")

MAX_SESSIONS = 256  # half handshakes included (guard D7)


@dataclass(eq=False)
class DecodePeer:
    sender: bytes
    user: str
    handshake: Handshake
    descriptor: bytes
    rank: int = 0
    peer: Peer | None = None  # the transport's connection, once the epoch is taken
    replaced: list[Peer] = field(default_factory=list)  # earlier ones with something still to be heard of


class DecodePeers:
    """`up(epoch)` is told when a lender's epoch has been taken; False: it will not be served."""

    def __init__(
        self,
        listener: Listener,
        transport: Transport,
        epoch: int,
        fingerprint: Fingerprint,
        up: Callable[[int], bool],
    ) -> None:
        self._listener = listener
        self._transport = transport
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._lends = fingerprint.direction == "pull"  # they attach to us then, and not we to them
        self._up = up
        self._by_sender: dict[bytes, DecodePeer] = {}
        self.by_epoch: dict[int, DecodePeer] = {}
        self.refused = 0

    def speaker(self, received: Received) -> int | None:
        """The epoch whose session this is: its connection, its key and, in the hand-off, its rank."""
        peer = self._by_sender.get(received.sender)
        if peer is None or peer.user != received.user:
            return None
        if isinstance(received.message, HandOff) and received.message.leg.d_rank != peer.rank:
            return None
        return peer.handshake.peer

    def send(self, epoch: int, message: Wire) -> bool:
        peer = self.by_epoch.get(epoch)
        return peer is not None and self._listener.send(peer.sender, message)

    def session(self, received: Received, progress: int) -> bool:
        """Takes a session message; False when it is not one."""
        message = received.message
        if isinstance(message, Hello):
            self._hello(received, message)
        elif isinstance(message, Confirm):
            self._confirm(received, message)
        elif isinstance(message, Ping):
            if self.speaker(received) == message.epoch:
                self._listener.send(received.sender, Pong(self._epoch, 0, progress))
            return False  # its closed set is the borrower's to hear
        else:
            return False
        return True

    def _hello(self, received: Received, hello: Hello) -> None:
        owner = self.by_epoch.get(hello.epoch)
        if owner is not None and owner.user != received.user:
            self._refuse(received, hello, "this epoch belongs to another key")
            return
        known = self._by_sender.get(received.sender)
        if known is None:
            if len(self._by_sender) >= MAX_SESSIONS and not self._drop_half_open():
                self._refuse(received, hello, f"{MAX_SESSIONS} sessions are open already")
                return
            handshake = Handshake(self._epoch, 0, self._fingerprint, lambda: secrets.randbits(63))
            known = DecodePeer(received.sender, received.user, handshake, hello.descriptor)
            self._by_sender[received.sender] = known
        known.descriptor, known.rank = hello.descriptor, hello.rank
        answer = known.handshake.on_hello(hello)
        if isinstance(answer, Welcome):
            try:
                answer = msgspec.structs.replace(
                    answer, descriptor=self._transport.reply(hello.epoch, hello.descriptor, pull=self._lends)
                )
            except ValueError as error:
                answer = Unwelcome(self._epoch, hello.challenge, f"transfer engine: {error}")
        if isinstance(answer, Unwelcome):
            self.refused += 1
            del self._by_sender[received.sender]
        self._listener.send(received.sender, answer)

    def _drop_half_open(self) -> bool:
        """Makes room for a session by ending the oldest handshake that stopped half way (guard D7)."""
        for sender, peer in self._by_sender.items():
            if peer.handshake.peer is None:
                del self._by_sender[sender]
                return True
        return False

    def _refuse(self, received: Received, hello: Hello, reason: str) -> None:
        self.refused += 1
        log.warning("a session is refused: %s", reason, extra={"peer_epoch": f"{hello.epoch:016x}"})
        self._listener.send(received.sender, Unwelcome(self._epoch, hello.challenge, reason))

    def _confirm(self, received: Received, confirm: Confirm) -> None:
        known = self._by_sender.get(received.sender)
        if known is None or not known.handshake.on_confirm(confirm):
            return
        before = self.by_epoch.get(confirm.epoch)
        if before is not None and before is not known:
            self._by_sender.pop(before.sender, None)  # the same process on a new connection
            known.peer, known.replaced = before.peer, before.replaced  # its posts are still to be heard of
        self.by_epoch[confirm.epoch] = known
        try:
            self._connect(known)
        except ValueError as error:
            self.forget(confirm.epoch)
            self.refused += 1
            self._listener.send(received.sender, Unwelcome(self._epoch, 0, f"transfer engine: {error}"))
            return
        if not self._up(confirm.epoch):
            self.forget(confirm.epoch)
            self.refused += 1
            self._listener.send(received.sender, Unwelcome(self._epoch, 0, "this epoch was taken for dead"))
            return
        if before is None:
            log.info("session with a decode worker", extra={"peer_epoch": f"{confirm.epoch:016x}"})

    def _connect(self, known: DecodePeer) -> None:
        """The same descriptor gives the same connection; another one means that the old one is fenced over there."""
        if self._lends:
            return
        before, known.peer = known.peer, self._transport.connect(known.descriptor, self._epoch)
        if before is not None and before != known.peer:
            self._transport.disconnect(before)
            known.replaced = [peer for peer in (*known.replaced, before) if not self._transport.drain(peer)]

    def drained(self, epoch: int) -> bool:
        """Whether everything posted for it, on whatever connection, has landed or never will."""
        known = self.by_epoch.get(epoch)
        if known is None or known.peer is None:
            return False
        return all(self._transport.drain(peer) for peer in (known.peer, *known.replaced))

    def forget(self, epoch: int) -> None:
        known = self.by_epoch.pop(epoch, None)
        if known is None:
            return
        log.info("a decode worker's session ends", extra={"peer_epoch": f"{epoch:016x}"})
        self._by_sender.pop(known.sender, None)
        if known.peer is not None:
            self._transport.disconnect(known.peer)

    @property
    def half_open(self) -> int:
        """Handshakes whose CONFIRM has not come, or never will: of their peers nothing is known."""
        return sum(peer.handshake.peer is None for peer in self._by_sender.values())

    def __len__(self) -> int:
        return len(self._by_sender)
