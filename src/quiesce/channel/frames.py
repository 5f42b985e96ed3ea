"""What an end of the channel does with frames: encode or refuse, decode or count. No sockets here."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from quiesce.core.codec import Codec
from quiesce.core.messages import Wire

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """`sender` routes an answer back; `user` is the key (z85) that the peer proved to own."""

    sender: bytes
    user: str
    message: Wire


class LinkEvent(Enum):
    UP = "up"  # connected, both keys proven
    DOWN = "down"  # the peer closed, died, is not there, or either side refused the other's key


KINDS = ("key", "half", "protocol", "foreign")
FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "key",  # not on the ring
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "half",  # it stopped half way, or said nothing
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol",  # it broke the handshake's rules, or has another key for us
}
ARRIVALS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
for failure in FAILED:
    ARRIVALS |= failure
MONITOR_HIGH_WATER = 50_000  # events; ZeroMQ's own thread waits when there are more
MONITOR_AT_ONCE = 1024
SETTLED = 7.0  # seconds after which a connection is a peer's or never will be: a handshake has five


class Arrivals:
    """Connections to a listener, of whoever it may be, and what became of them. Of one that speaks another protocol
    altogether ZeroMQ says only that it came: it counts as `foreign` once it can be nothing else any more."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.accepted = self.peers = self._settled = 0
        self._failed = dict.fromkeys(KINDS, 0)
        self._recent: deque[tuple[int, int]] = deque()  # a second, and how many had come by its end

    def take(self, event: int) -> None:
        """What a listener's monitor says."""
        if event == zmq.EVENT_ACCEPTED:
            self._settle()
            self.accepted += 1
            second = int(self._now())
            if self._recent and self._recent[-1][0] == second:
                self._recent.pop()
            self._recent.append((second, self.accepted))
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.peers += 1
        else:
            self._failed[FAILED[event]] += 1

    def _settle(self) -> None:
        while self._recent and self._recent[0][0] + 1 + SETTLED <= self._now():
            self._settled = self._recent.popleft()[1]

    def failed(self) -> dict[str, int]:
        """By kind, those that never became a peer's."""
        self._settle()
        told = sum(count for kind, count in self._failed.items() if kind != "foreign")
        self._failed["foreign"] = max(self._failed["foreign"], self._settled - self.peers - told)
        return dict(self._failed)


@dataclass
class Counts:
    """What one end lost; all of it is expected and repeated by the protocol, so it is counted and not raised."""

    dropped: int = 0  # sends refused: no such peer, peer not connected, its queue full, message too large
    malformed: int = 0  # received, not a message
    misplaced: int = 0  # a message, and not for us to hear from that peer
    arrivals: Arrivals = field(default_factory=Arrivals)

    def arrival(self, frames: list[bytes]) -> None:
        """Counts what a listener's monitor says."""
        self.arrivals.take(parse_monitor_message(frames)["event"])


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
