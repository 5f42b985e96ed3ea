"""The same two ends for asyncio. `send` is an ordinary call, because it never waits; `receive` is awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from quiesce.channel.frames import ARRIVALS, MONITOR_AT_ONCE, Counts, Framing, LinkEvent, LinkState, Received, watch
from quiesce.channel.keys import KeyPair
from quiesce.channel.options import configure_link, configure_listener, remove_socket_file
from quiesce.channel.sockets import readable
from quiesce.core.codec import Codec
from quiesce.core.messages import Wire

log = logging.getLogger(__name__)

T = TypeVar("T")


class _AsyncEnd:
    def __init__(self, codec: Codec | None) -> None:
        self._framing = Framing(codec)

    @property
    def dropped(self) -> int:
        """Sends refused: no such peer, peer not connected, its queue full, or a message too large."""
        return self._framing.counts.dropped

    @property
    def malformed(self) -> int:
        return self._framing.counts.malformed

    def _send(self, socket: zmq.asyncio.Socket, to: list[bytes], message: Wire) -> bool:
        frame = self._framing.encode(message)
        if frame is None:
            return False
        # With NOBLOCK the future is done when it is returned; only the socket's own wake-ups need it.
        sent = asyncio.ensure_future(socket.send_multipart([*to, frame], zmq.NOBLOCK))
        error = sent.exception()
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            self._framing.counts.dropped += 1
            return False
        raise error

    @staticmethod
    async def _receive(
        socket: zmq.asyncio.Socket, limit: int, parse: Callable[[list[zmq.Frame]], T | None]
    ) -> list[T]:
        found: list[T] = []
        while not found:
            flags = 0
            for _ in range(limit):
                if flags and not readable(socket):
                    break
                try:
                    frames: list[Any] = await socket.recv_multipart(flags, copy=False)
                except zmq.Again:  # whose it was has gone in between
                    break
                if (parsed := parse(frames)) is not None:
                    found.append(parsed)
                flags = zmq.NOBLOCK
        return found


class AsyncListener(_AsyncEnd):
    """As `Listener`, made inside a running event loop."""

    def __init__(self, context: zmq.Context[Any], bind: str, keys: KeyPair, codec: Codec | None = None) -> None:
        super().__init__(codec)
        self.socket = context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket)
        configure_listener(self.socket, keys)
        self._monitor = context.socket(zmq.PAIR, socket_class=zmq.asyncio.Socket)
        watch(self.socket, self._monitor, ARRIVALS)
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {bind}")
        try:
            self.socket.bind(bind)
        except zmq.ZMQError:
            self._close()
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, to: bytes, message: Wire) -> bool:
        """False: not sent, because that peer is gone or its queue is full; counted in `dropped`."""
        return self._send(self.socket, [to], message)

    async def receive(self, limit: int = 256) -> list[Received]:
        """Waits for at least one message and returns what has arrived, at most `limit`. Gives way to others first."""
        await asyncio.sleep(0)
        return await self._receive(self.socket, limit, self._framing.from_peer)

    async def _watch(self) -> None:
        while True:
            for _ in range(MONITOR_AT_ONCE):
                self.counts.arrival(await self._monitor.recv_multipart())
            await asyncio.sleep(0)  # a message that is there does not make `await` give way

    @property
    def counts(self) -> Counts:
        return self._framing.counts

    def close(self) -> None:
        if not self.socket.closed:
            self._close()
            remove_socket_file(self.endpoint)

    def _close(self) -> None:
        self._watching.cancel()
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
        self.socket = context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket)
        configure_link(self.socket, server_public_key, keys)
        watch = f"inproc://quiesce.monitor.{id(self)}"
        self.socket.monitor(watch, LinkState.EVENTS)
        self._monitor = context.socket(zmq.PAIR, socket_class=zmq.asyncio.Socket)
        self._monitor.connect(watch)
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
            change = self._state.on(await self._monitor.recv_multipart())
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
        return self._send(self.socket, [], message)

    async def receive(self, limit: int = 256) -> list[Wire]:
        """Waits for at least one message and returns what has arrived, at most `limit`. Gives way to others first."""
        await asyncio.sleep(0)
        return await self._receive(self.socket, limit, self._framing.from_server)

    def close(self) -> None:
        if not self.socket.closed:
            self._watching.cancel()
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close(linger=0)
