"""Asks the router over HTTP, as a client would, whether a request could be served now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

LONGEST_ANSWER = 4 << 20  # bytes
PATIENCE = 2.0  # seconds


@dataclass(frozen=True)
class Health:
    """`workers`: those in good standing, by epoch. `missing`: why nothing can be served."""

    answers: bool
    ready: bool = False
    workers: frozenset[int] = frozenset()
    missing: str = "the router does not answer yet"


Probe = Callable[[], Awaitable[Health]]


def http_probe(host: str, port: int) -> Probe:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)

    async def probe() -> Health:
        try:
            async with asyncio.timeout(PATIENCE):
                status, body = await _get(reachable, port, "/health")
            return _health(status, body)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return Health(answers=False)

    return probe


async def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_ANSWER)
    try:
        # HTTP/1.0: the answer is not chunked and ends with the connection
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode("ascii"))
        head, _, body = (await _read_all(reader)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split(maxsplit=2)[1]) if head.startswith(b"HTTP/") else 0, body


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = bytearray()
    while chunk := await reader.read(64 << 10):
        answer += chunk
        if len(answer) > LONGEST_ANSWER:
            raise ValueError("the answer is too long")
    return bytes(answer)


def _health(status: int, body: bytes) -> Health:
    detail: dict[str, Any] = json.loads(body)
    workers = frozenset(int(w["epoch"], 16) for w in detail.get("workers", []) if not w.get("trouble"))
    missing = "; ".join([*_texts(detail.get("missing")), *_texts(detail.get("mismatches"))])
    return Health(True, status == 200, workers, missing)


def _texts(value: Any) -> list[str]:
    if not value:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
