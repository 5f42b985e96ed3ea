"""Reads a request's body: bounded in size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Message, Receive

from quiesce.api.errors import ApiError

BODY_SECONDS = 30.0


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """At most `limit` bytes. Raises ApiError 413 or 408, and ClientGone."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    with contextlib.suppress(ValueError):
        if int(headers.get(b"content-length", b"0")) > limit:
            raise too_large
    body = bytearray()
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
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
