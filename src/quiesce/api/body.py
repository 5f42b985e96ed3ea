"""Reads a request's body: bounded in size and time, and so are all that are arriving, together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Message, Receive

from quiesce.api.errors import ApiError, unavailable

BODY_SECONDS = 30.0
SMALL = 64 << 10  # bytes of each body that need no room: requests as people send them are never refused for it
MOST_AT_ONCE = 16  # times the largest body: what all large ones may have together while they arrive


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Bodies:
    """Those that are arriving at one server, each of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.room = MOST_AT_ONCE * limit

    async def read(self, receive: Receive, headers: Mapping[bytes, bytes], limit: int | None = None) -> bytes:
        """At most `limit` bytes. Raises ApiError 413, 408 or 503, and ClientGone."""
        limit = self.limit if limit is None else limit
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        with contextlib.suppress(ValueError):
            if int(headers.get(b"content-length", b"0")) > limit:
                raise too_large
        body, taken = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message: Message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
                    more = max(0, len(body) - SMALL) - taken
                    if more > self.room:
                        raise unavailable("too many large bodies are arriving", "overloaded")
                    self.room -= more
                    taken += more
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        finally:
            self.room += taken
