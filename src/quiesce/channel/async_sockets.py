"""The same two ends for asyncio. `send` is an ordinary call, because it never waits; `receive` is awaited.

They are plain sockets that the event loop watches. ZeroMQ tells of news by an edge: whoever asks a socket for its
events, or sends, uses it up, so each of those looks whether somebody waits for what has come meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from quiesce.channel.frames import ARRIVALS, MONITOR_AT_ONCE, Counts, Framing, LinkEvent, LinkState, Received, watch
from quiesce.channel.keys import KeyPair
from quiesce.channel.options import configure_link, configure_listener, remove_socket_file
from quiesce.channel.sockets import as_bytes, drain, readable, send
from quiesce.core.codec import Codec
from quiesce.core.messages import Wire

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Inbox:
    """One socket's, for one reader. Made inside the running loop; `close` it before the socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None  # somebody waits for it
        self._file = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self.look)

    def look(self) -> None:
        """Wakes whoever waits, if there is something to read."""
        if readable(self._socket) and self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def receive(self, limit: int, parse: Callable[[list[zmq.Frame]], T | None]) -> list[T]:
        """At least one, at most `limit`. Gives way to others first."""
        await asyncio.sleep(0)
        while not (found := drain(self._socket, limit, parse)):
            if readable(self._socket):  # nothing of so much was a message, and there is more
                await asyncio.sleep(0)
                continue
            self._news = self._loop.create_future()
            await self._news
        return found

    def close(self) -> None:
        self._loop.remove_reader(self._file)


class _AsyncEnd:
    socket: zmq.Socket[bytes]
    _inbox: _Inbox

    def __init__(self, codec: Codec | None) -> None:
        self._framing = Framing(codec)

    @property
    def dropped(self) -> int:
        """Sends refused: no such peer, peer not connected, its queue full, or a message too large."""
        return self._framing.counts.dropped

    @property
    def malformed(self) -> int:
        return self._framing.counts.malformed

    def _send(self, to: list[bytes], message: Wire) -> bool:
        sent = send(self._framing, self.socket, to, message)
        self._inbox.look()
        return sent


class AsyncListener(_AsyncEnd):
    """As `Listener`, made inside a running event loop."""

    def __init__(self, context: zmq.Context[Any], bind: str, keys: KeyPair, codec: Codec | None = None) -> None:
        super().__init__(codec)
        self.socket = context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        configure_listener(self.socket, keys)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        watch(self.socket, self._monitor, ARRIVALS)
        self._inbox, self._arrivals = _Inbox(self.socket), _Inbox(self._monitor)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {bind}")
        try:
            self.socket.bind(bind)
        except zmq.ZMQError:
            self._close()
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, to: bytes, message: Wire) -> bool:
        """False: not sent, because that peer is gone or its queue is full; counted in `dropped`."""
        return self._send([to], message)

    async def receive(self, limit: int = 256) -> list[Received]:
        """Waits for at least one message and returns what has arrived, at most `limit`. Gives way to others first."""
        return await self._inbox.receive(limit, self._framing.from_peer)

    async def _watch(self) -> None:
        while True:
            for frames in await self._arrivals.receive(MONITOR_AT_ONCE, as_bytes):
                self.counts.arrival(frames)

    @property
    def counts(self) -> Counts:
        return self._framing.counts

    def close(self) -> None:
        if not self.socket.closed:
            self._close()
            remove_socket_file(self.endpoint)

    def _close(self) -> None:
        self._watching.cancel()
        self._inbox.close()
        self._arrivals.close()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


class AsyncLink(_AsyncEnd):
    """As `Link`, made inside a running event loop. `on_state` is called in that loop at each UP and DOWN."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        server_public_key: str,
        keys: KeyPair,
        on_state: Callable[[LinkEvent], None] | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(codec)
        self.endpoint = endpoint
        self._state = LinkState()
        self._on_state = on_state
        self.socket = context.socket(zmq.DEALER, socket_class=zmq.Socket)
        configure_link(self.socket, server_public_key, keys)
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(LinkState.EVENTS)
        self._inbox, self._changes = _Inbox(self.socket), _Inbox(self._monitor)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {endpoint}")
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def is_up(self) -> bool:
        return self._state.current is LinkEvent.UP

    async def _watch(self) -> None:
        while True:
            for frames in await self._changes.receive(MONITOR_AT_ONCE, as_bytes):
                change = self._state.on(frames)
                if change is None or self._on_state is None:
                    continue
                try:
                    self._on_state(change)
                except Exception:  # the watch must outlive one failing callback
                    log.exception("the state callback of the link to %s failed", self.endpoint)

    @property
    def refused(self) -> bool:
        """The listener does not know our key. ZeroMQ does not try again: only a new link can get in."""
        return self._state.refused

    def send(self, message: Wire) -> bool:
        """False: not sent, because the link is down or the queue is full; counted in `dropped`."""
        if self._state.current is LinkEvent.DOWN:  # what is left of the old connection may still take messages
            self._framing.counts.dropped += 1
            return False
        return self._send([], message)

    async def receive(self, limit: int = 256) -> list[Wire]:
        """Waits for at least one message and returns what has arrived, at most `limit`. Gives way to others first."""
        return await self._inbox.receive(limit, self._framing.from_server)

    def close(self) -> None:
        if not self.socket.closed:
            self._watching.cancel()
            self._inbox.close()
            self._changes.close()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=0)
