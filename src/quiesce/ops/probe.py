"""Asks the router over HTTP, as a client would, whether a request could be served now."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

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


def http_probe(host: str, port: int, tls: ssl.SSLContext | None = None) -> Probe:
    """`tls`: of a client, where the server speaks it."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)

    async def probe() -> Health:
        try:
            async with asyncio.timeout(PATIENCE):
                status, body = await _get(reachable, port, "/health", tls)
            return _health(status, body)
        except (OSError, ValueError, TimeoutError, msgspec.MsgspecError):
            return Health(answers=False)

    return probe


async def _get(host: str, port: int, path: str, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_ANSWER, ssl=tls)
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


class _Worker(msgspec.Struct):
    epoch: str
    trouble: str | None = None
    drained: bool = False  # an operator's choice, and no reason to restart it


class _Detail(msgspec.Struct):
    """The part of /health that matters here."""

    workers: list[_Worker] = []
    missing: list[str] = []
    mismatches: list[str] = []


def _health(status: int, body: bytes) -> Health:
    detail = msgspec.json.decode(body, type=_Detail)
    workers = frozenset(int(worker.epoch, 16) for worker in detail.workers if not worker.trouble or worker.drained)
    return Health(True, status == 200, workers, "; ".join([*detail.missing, *detail.mismatches]))
