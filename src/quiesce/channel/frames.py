"""What an end of the channel does with frames: encode or refuse, decode or count. No sockets here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from quiesce.core.messages import Codec, Wire

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """`sender` routes an answer back; `user` is the key (z85) that the peer proved to own."""

    sender: bytes
    user: str
    message: Wire


class LinkEvent(Enum):
    UP = "up"  # connected, both keys proven
    DOWN = "down"  # the peer closed, died, is not there, or either side refused the other's key


@dataclass
class Counts:
    """What one end lost; all of it is expected and repeated by the protocol, so it is counted and not raised."""

    dropped: int = 0  # sends refused: no such peer, peer not connected, its queue full, message too large
    malformed: int = 0  # received, not a message
    accepted: int = 0  # connections of whoever it may be
    handshakes_failed: int = 0  # of those: a key that is not known, or a handshake that stopped half way

    def arrival(self, frames: list[bytes]) -> None:
        """Counts what a listener's monitor says."""
        if parse_monitor_message(frames)["event"] == zmq.EVENT_ACCEPTED:
            self.accepted += 1
        else:
            self.handshakes_failed += 1


HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
ARRIVALS = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED
MONITOR_HIGH_WATER = 50_000  # events; ZeroMQ's own thread waits when there are more


def watch(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], events: int) -> None:
    """`monitor` (a PAIR of the same context) hears these events of `socket`."""
    address = f"inproc://quiesce.monitor.{id(socket)}"
    socket.monitor(address, events)
    monitor.set(zmq.RCVHWM, MONITOR_HIGH_WATER)
    monitor.connect(address)


class Framing:
    """The codec and counters of one end."""

    def __init__(self, codec: Codec | None) -> None:
        self.codec = codec or Codec()
        self.counts = Counts()

    def encode(self, message: Wire) -> bytes | None:
        try:
            return self.codec.encode(message)
        except ValueError as error:
            self.counts.dropped += 1
            log.error("message not sent: %s", error)
            return None

    def from_peer(self, frames: list[zmq.Frame]) -> Received | None:
        """[routing id, payload] as a listener receives it."""
        if len(frames) != 2:
            self.counts.malformed += 1
            return None
        try:
            user = str(frames[1].get("User-Id"))
        except zmq.ZMQError:  # no authenticated user: not a peer of ours
            self.counts.malformed += 1
            return None
        message = self.from_server(frames[1:])
        return None if message is None else Received(frames[0].bytes, user, message)

    def from_server(self, frames: list[zmq.Frame]) -> Wire | None:
        """[payload] as a link receives it."""
        message = self.codec.decode(frames[0].buffer) if len(frames) == 1 else None
        if message is None:
            self.counts.malformed += 1
        return message


class LinkState:
    """Turns monitor events into changes: UP and DOWN alternate, repeated failures are one DOWN."""

    EVENTS = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_CONNECT_RETRIED
    )

    def __init__(self) -> None:
        self.current: LinkEvent | None = None
        self.refused = False

    def on(self, frames: list[bytes]) -> LinkEvent | None:
        """The change that one monitor message means, or None."""
        event = parse_monitor_message(frames)["event"]
        self.refused |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        now = LinkEvent.UP if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else LinkEvent.DOWN
        if now is self.current:
            return None
        self.current = now
        return now
