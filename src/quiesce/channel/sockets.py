"""The two ends of a control conversation for a loop that polls: a listener (ROUTER) and links to it (DEALER).

Sends never block and may be lost; the protocol above repeats. Every queue is bounded, nothing lingers.
One thread owns an end. Hand `.socket` and `.monitor` to a `zmq.Poller`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from quiesce.channel.frames import (
    ARRIVALS,
    MONITOR_AT_ONCE,
    Counts,
    Framing,
    LinkEvent,
    LinkState,
    Received,
    watch,
)
from quiesce.channel.keys import KeyPair
from quiesce.channel.options import configure_link, configure_listener, remove_socket_file
from quiesce.core.codec import Codec
from quiesce.core.messages import Wire

T = TypeVar("T")

READABLE = int(zmq.POLLIN)  # an enum's arithmetic costs more than the question


class _End:
    def __init__(self, codec: Codec | None) -> None:
        self._framing = Framing(codec)

    @property
    def dropped(self) -> int:
        """Sends refused: no such peer, peer not connected, its queue full, or a message too large."""
        return self._framing.counts.dropped

    @property
    def malformed(self) -> int:
        return self._framing.counts.malformed


def send(framing: Framing, socket: zmq.Socket[bytes], to: list[bytes], message: Wire) -> bool:
    """Never waits. False: not sent, and counted."""
    frame = framing.encode(message)
    if frame is None:
        return False
    try:
        socket.send_multipart([*to, frame], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            raise
        framing.counts.dropped += 1
        return False
    return True


def readable(socket: zmq.Socket[Any]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)


def drain(socket: zmq.Socket[bytes], limit: int, parse: Callable[[list[zmq.Frame]], T | None]) -> list[T]:
    """What has arrived, at most `limit` messages; never waits."""
    found: list[T] = []
    for _ in range(limit):
        if not readable(socket):  # to ask costs a fraction of an exception
            break
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:  # whose it was has gone in between
            break
        parsed = parse(frames)
        if parsed is not None:
            found.append(parsed)
    return found


def as_bytes(frames: list[zmq.Frame]) -> list[bytes]:
    """What monitors say, as they are parsed."""
    return [frame.bytes for frame in frames]


class Listener(_End):
    """Binds and accepts peers whose keys the context's authenticator knows.

    bind: `tcp://127.0.0.1:*` or `ipc:///path`. Raises zmq.ZMQError when the address cannot be had.
    """

    def __init__(self, context: zmq.Context[Any], bind: str, keys: KeyPair, codec: Codec | None = None) -> None:
        super().__init__(codec)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        configure_listener(self.socket, keys)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        watch(self.socket, self.monitor, ARRIVALS)
        try:
            self.socket.bind(bind)
        except zmq.ZMQError:
            self._close(0)
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, to: bytes, message: Wire) -> bool:
        """False: not sent, because that peer is gone or its queue is full; counted in `dropped`."""
        return send(self._framing, self.socket, [to], message)

    def receive(self, limit: int = 256) -> list[Received]:
        """What has arrived, at most `limit` messages; never waits."""
        counts = self._framing.counts
        drain(self.monitor, MONITOR_AT_ONCE, lambda frames: counts.arrival(as_bytes(frames)))
        return drain(self.socket, limit, self._framing.from_peer)

    @property
    def counts(self) -> Counts:
        """As of the last `receive`."""
        return self._framing.counts

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long the context's end waits for what was sent before."""
        if not self.socket.closed:
            self._close(linger_ms)
            remove_socket_file(self.endpoint)

    def _close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class Link(_End):
    """Connects to one listener, proves `keys` and checks that the other side owns `server_public_key`.

    It reconnects by itself with back-off until closed. Nothing is queued while it is down.
    Raises zmq.ZMQError or ValueError for an endpoint or a key that means nothing.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        server_public_key: str,
        keys: KeyPair,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(codec)
        self.endpoint = endpoint
        self._state = LinkState()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER, socket_class=zmq.Socket)
        try:
            configure_link(self.socket, server_public_key, keys)
        except (zmq.ZMQError, ValueError):
            self.socket.close(linger=0)
            raise
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(LinkState.EVENTS)
        try:
            self.socket.connect(endpoint)
        except (zmq.ZMQError, ValueError):
            self.close()
            raise

    @property
    def is_up(self) -> bool:
        """As of the last `state_changes()`."""
        return self._state.current is LinkEvent.UP

    @property
    def is_down(self) -> bool:
        """As of the last `state_changes()`; False also while it is not known yet."""
        return self._state.current is LinkEvent.DOWN

    @property
    def refused(self) -> bool:
        """The listener did not know our key. ZeroMQ does not try again by itself: `again` does."""
        return self._state.refused

    def again(self) -> None:
        """Connects anew after a refusal: the key may be on the ring by now."""
        self._state.refused = False
        self.socket.disconnect(self.endpoint)
        self.socket.connect(self.endpoint)

    def send(self, message: Wire) -> bool:
        """False: not sent, because the link is down or the queue is full; counted in `dropped`."""
        if self._state.current is LinkEvent.DOWN:  # what is left of the old connection may still take messages
            self._framing.counts.dropped += 1
            return False
        return send(self._framing, self.socket, [], message)

    def receive(self, limit: int = 256) -> list[Wire]:
        """What has arrived, at most `limit` messages; never waits."""
        return drain(self.socket, limit, self._framing.from_server)

    def state_changes(self, limit: int = 256) -> list[LinkEvent]:
        """Changes since the last call, oldest first; UP and DOWN alternate. DOWN also says: never came up."""

        def parse(frames: list[zmq.Frame]) -> LinkEvent | None:
            return self._state.on(as_bytes(frames))

        return drain(self.monitor, limit, parse)

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
