"""Bounds on connections to the HTTP port: a connection on which no request comes is worth nothing and costs memory.

A request's head must arrive within seconds and within kilobytes. Connections that wait for one are bounded in number:
beyond that the oldest of them makes room. When all connections are taken, the oldest that has no whole request makes
room as well. Connections with a request are left alone.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 10.0
HEAD_BYTES = 64 << 10
MOST_HEADLESS = 512
LINGER_SECONDS = 5.0  # for the rest of a request that was answered before all of it had come
MOST_PIPELINED = 16  # requests that wait behind the one that is being answered
COUNTED = (
    *("heads_late", "heads_evicted", "heads_too_large", "requests_invalid", "connections_refused", "spare_evicted"),
    *("tls_no_certificate", "tls_bad_certificate", "tls_failed"),
)
# Nothing here upgrades, so the wish is ignored; the parser would stop before the body that comes with it. Java's
# client and `curl --http2` ask for h2c so. Nothing gets longer, so that lengths which were announced stay right.
UPGRADE = re.compile(rb"(?i)\r\nupgrade(?=[ \t]*:)")


class Waiting(Protocol):
    """A connection on which something must come soon."""

    def abort(self) -> None: ...


class Gate:
    """Of one port. `most`: connections of every kind."""

    def __init__(self, most: int, headless: int = MOST_HEADLESS, seconds: float = HEAD_SECONDS) -> None:
        self.most, self.most_headless, self.seconds = most, headless, seconds
        self.open = 0
        self.headless: dict[Waiting, asyncio.TimerHandle] = {}  # the oldest first
        self.spare: dict[Waiting, None] = {}  # those between two requests or with half a body, the oldest first
        self._counts: Counter[str] = Counter()

    def counters(self) -> dict[str, int]:
        return {f"http_{name}": self._counts[name] for name in COUNTED}

    def protocol(self) -> type[asyncio.Protocol]:
        """For uvicorn."""
        return type("GatedHttp", (BoundedHttp,), {"gate": self})

    def count(self, what: str) -> None:
        self._counts[what] += 1

    def let_in(self) -> bool:
        if self.open >= self.most and not self._evict():
            self._counts["connections_refused"] += 1
            return False
        self.open += 1
        return True

    def await_head(self, connection: Waiting) -> None:
        if connection not in self.headless:
            if len(self.headless) >= self.most_headless:
                self._evict()
            loop = asyncio.get_running_loop()
            self.headless[connection] = loop.call_later(self.seconds, self._end, connection, "heads_late")

    def head_came(self, connection: Waiting) -> None:
        timer = self.headless.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def too_large(self, connection: Waiting) -> None:
        self._end(connection, "heads_too_large")

    def invalid(self, connection: BoundedHttp) -> None:
        """No HTTP; it has been told so."""
        self._counts["requests_invalid"] += 1
        self.head_came(connection)

    def _evict(self) -> bool:
        if (oldest := next(iter(self.headless), None)) is not None:
            self._end(oldest, "heads_evicted")
        elif (oldest := next(iter(self.spare), None)) is not None:
            del self.spare[oldest]
            self._end(oldest, "spare_evicted")
        return oldest is not None

    def _end(self, connection: Waiting, why: str) -> None:
        self._counts[why] += 1
        self.head_came(connection)
        connection.abort()


def without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """HTTP/1.0 knows no chunks: an answer of unknown length ends with its connection."""
    send = cycle.send
    unbounded = False

    async def plain(message: Any) -> None:
        nonlocal unbounded
        if message["type"] == "http.response.start":
            unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unbounded:
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf  # type: ignore[assignment]
        elif unbounded and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return plain


def without_reset(cycle: RequestResponseCycle, linger: Callable[[], None]) -> Callable[[Any], Awaitable[None]]:
    """To close with bytes unread resets the connection, and the client loses the answer it was just given."""
    send = cycle.send

    async def patient(message: Any) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        early = last and cycle.more_body and not cycle.disconnected
        cycle.keep_alive = cycle.keep_alive or early
        await send(message)
        if early:
            linger()

    return patient


class Together:
    """A connection's transport for one answer: its head leaves with the first of its body. Two packets are two calls
    of the kernel here, and two wake-ups of whoever waits for a first token."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport, self._cycle = transport, cycle
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        if self._cycle.response_started and not self._begun:  # before that: 100 Continue
            self._begun, self._head = True, data
            return
        head, self._head = self._head, None
        self._transport.write(data if head is None else head + data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """An answer without a body is over."""
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PipelineTooLongError(Exception):
    """More requests than may wait on one connection."""


class BoundedHttp(HttpToolsProtocol):
    gate: Gate
    _counted = False
    _head = 0  # bytes of the head that is arriving
    _running: RequestResponseCycle | None = None  # `cycle` is the latest: others may wait before it
    _lingering: asyncio.TimerHandle | None = None  # a request was answered whose rest is still to come
    _stays = True  # open for another request when that rest has come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._counted = self.gate.let_in()
        if self._counted:
            self.gate.await_head(self)
        else:
            transport.abort()

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if (self.cycle is None or self.cycle.response_complete) and self._lingering is None:
            self.gate.await_head(self)
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"\r\nx-asked", head) + end + rest
        super().data_received(data)
        if self in self.gate.headless:  # all of it was head
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self.gate.too_large(self)

    def send_400_response(self, msg: str) -> None:
        self.gate.invalid(self)
        super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self.gate.head_came(self)
        self._head = 0
        if len(self.pipeline) >= MOST_PIPELINED:
            raise PipelineTooLongError
        super().on_headers_complete()
        self.gate.spare[self] = None
        self.cycle.transport = Together(self.transport, self.cycle)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign,assignment]
        self._stays = self.cycle.keep_alive
        self.cycle.send = without_reset(self.cycle, self._linger)  # type: ignore[method-assign,assignment]
        if self.pipeline:  # the wait for its turn must not keep us from hearing that the client has left
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self.gate.spare.pop(self, None)
        super().on_message_complete()
        if self._lingering is not None:
            self._no_longer()
            if self._stays:
                self.gate.spare[self] = None
            else:
                self.transport.close()

    def _linger(self) -> None:
        if not self.transport.is_closing():
            if not self._stays and self.transport.can_write_eof():
                self.transport.write_eof()
            self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _no_longer(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def on_response_complete(self) -> None:
        if self._running is not None:
            self._running.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self.gate.spare[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.head_came(self)
        self._no_longer()
        self.gate.spare.pop(self, None)
        if self._counted:
            self._counted = False
            self.gate.open -= 1
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
