"""What HTTP allows and what not: what comes to the port is served, refused with 4xx, or closed and counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiesce.api import body as body_module
from quiesce.api.chat import TextModel
from quiesce.router import http as http_module
from quiesce.router.http import Gate
from router.cluster import MODEL, Cluster, cluster, until

pytestmark = pytest.mark.anyio

ASKED = json.dumps({"model": MODEL, "prompt": [40, 41], "max_tokens": 2}).encode()
STREAM = json.dumps({"model": MODEL, "prompt": [40, 41], "max_tokens": 2, "stream": True}).encode()
PATH = "/v1/completions"


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text) as made:
        yield made


def request(
    body: bytes = ASKED,
    *headers: str,
    path: str = PATH,
    method: str = "POST",
    version: str = "1.1",
    close: bool = True,
) -> bytes:
    said = any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers)
    lines = [f"{method} {path} HTTP/{version}", "Host: q", "Content-Type: application/json", *headers]
    lines += [] if said else [f"Content-Length: {len(body)}"]
    lines += ["Connection: close"] if close and not any("Connection" in header for header in headers) else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def talk(c: Cluster, *pieces: bytes) -> bytes:
    """Everything that comes back until the server closes the connection, or has answered and leaves it open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        found = b""
        while not whole(found):
            try:
                more = await asyncio.wait_for(reader.read(65536), 30)
            except ConnectionError:
                return found
            if not more:
                return found
            found += more
        return found
    finally:
        writer.close()


def whole(found: bytes) -> bool:
    """It is one answer, to its last byte, and another request may follow."""
    head, _, body = found.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return bool(length) and len(body) == int(length) and b"connection: close" not in head.lower()


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionError:
        return True


CHUNKED = b"5\r\n" + ASKED[:5] + f"\r\n{len(ASKED) - 5:x}\r\n".encode() + ASKED[5:] + b"\r\n0\r\n\r\n"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
SERVED: dict[str, tuple[bytes, ...]] = {
    "in one piece": (request(),),
    "byte by byte at its edges": (request()[:1], request()[1:30], request()[30:-3], request()[-3:]),
    "empty lines before it": (b"\r\n\r\n" + request(),),
    "chunked": (request(CHUNKED, "Transfer-Encoding: chunked"),),
    "expecting to be told to go on": (request(ASKED, "Expect: 100-continue")[: -len(ASKED)], ASKED),
    "asking for HTTP/2, as Java's client does": (request(ASKED, *H2C),),
    "... with its head in two pieces": (request(ASKED, *H2C)[:40], request(ASKED, *H2C)[40:]),
    "asking for a websocket": (request(ASKED, "Connection: upgrade", "UPGRADE: websocket"),),
    "HTTP/1.0": (request(version="1.0"),),
    "an absolute URI": (request(path=f"http://elsewhere{PATH}"),),
    "escapes in the path": (request(path="/v1/complet%69ons?x=%ff%00"),),
    "another content type": (request().replace(b"application/json", b"text/plain"),),
    "very many headers": (request(ASKED, *(f"X-{i}: {'a' * 40}" for i in range(500))),),
    "a label that is no ASCII": (request(ASKED, "X-Request-Id: é")),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
async def test_unusual_requests_are_served(c: Cluster, case: str) -> None:
    pieces = SERVED[case]
    answer = await talk(c, *((pieces,) if isinstance(pieces, bytes) else pieces))
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason":"length"' in answer, answer
    await c.idle()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_chunks_come_to_those_who_know_them_alone(c: Cluster, version: str) -> None:
    answer = await talk(c, request(STREAM, version=version))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    assert b"connection: close" in head.lower(), "an answer without a length ends with its connection"
    if version == "1.0":
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n"), body
        page = await talk(c, request(b"", path="/health", method="GET", version="1.0"))
        assert b"content-length: " in page.lower() and json.loads(page.partition(b"\r\n\r\n")[2])["missing"] == []
    else:
        assert body.endswith(b"\r\n0\r\n\r\n"), body
    await c.idle()


async def test_a_client_that_says_no_more_has_left_and_nothing_runs_on_for_it(c: Cluster) -> None:
    """The end of its sending side is the only sign of a client that leaves before its first token."""
    c.prefill.hold = c.decode.hold = True
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.port)
    writer.write(request())
    await until(lambda: c.decode.starts and c.prefill.starts)
    writer.write_eof()
    assert await gone(reader)
    writer.close()
    await until(lambda: c.decode.cancels and c.prefill.cancels)
    await c.idle()


async def test_pipelined_requests_are_answered_in_order(c: Cluster) -> None:
    pieces = request(STREAM, close=False) + request(close=False) + request(b"{", close=False) + request()
    answer = await talk(c, pieces)
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"HTTP/1.1 400 ") == 1
    assert answer.index(b"[DONE]") < answer.index(b"invalid_json") < answer.rindex(b"HTTP/1.1 200 OK")
    await c.idle()


REFUSED: dict[str, tuple[bytes, bytes]] = {
    "another method": (request(method="PUT"), b"405"),
    "OPTIONS": (request(b"", method="OPTIONS"), b"405"),
    "HEAD of a generation": (request(b"", method="HEAD"), b"405"),
    "a slash too many": (request(path=f"{PATH}/"), b"404"),
    "two slashes": (request(path="//v1//completions"), b"404"),
    "dots": (request(path="/v1/../v1/completions"), b"404"),
    "capitals": (request(path="/V1/COMPLETIONS"), b"404"),
    "no body": (request(b""), b"400"),
    "a form": (request(b"a=b&c=d"), b"400"),
    "a compressed body": (request(b"\x1f\x8b" + ASKED, "Content-Encoding: gzip"), b"400"),
    "a body after one that is whole": (request(ASKED + b"x"), b"400"),
}  # fmt: skip
NO_HTTP: dict[str, bytes] = {
    "an unknown method": request(method="BREW"),
    "CONNECT": request(b"", method="CONNECT", path="a:1"),
    "two lengths": request(ASKED, "Content-Length: 3", f"Content-Length: {len(ASKED)}"),
    "a length and chunks": request(b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"),
    "a negative length": request(ASKED, "Content-Length: -1"),
    "a length beyond all numbers": request(ASKED, f"Content-Length: {10**30}"),
    "a chunk that is none": request(b"zz\r\n", "Transfer-Encoding: chunked"),
    "a null byte in a header": request(ASKED, "X-A: a\0b"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 400,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "noise": bytes(range(256)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_served_is_a_4xx_in_the_usual_shape(c: Cluster, case: str) -> None:
    asked, status = REFUSED[case]
    answer = await talk(c, asked)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"location" not in head.lower(), "nobody is sent to a host that the client has named"
    assert b"HEAD" in asked or set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    await c.idle()
    assert not c.decode.starts and not c.prefill.starts


@pytest.mark.parametrize("case", NO_HTTP)
async def test_what_is_no_http_is_told_so_closed_and_counted(c: Cluster, case: str) -> None:
    answer = await talk(c, NO_HTTP[case])
    assert answer.startswith(b"HTTP/1.1 400") and b"onnection: close" in answer, answer
    assert c.router.dispatcher.counters()["http_requests_invalid"] == 1
    await until(lambda: not c.router._gate.open)
    assert not c.router._gate.headless
    assert (await c.chat()).status_code == 200


async def test_a_body_that_does_not_come_is_a_408_and_holds_nothing(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.2)
    for half in (request()[:-3], request(CHUNKED[:12], "Transfer-Encoding: chunked")):
        answer = await talk(c, half)
        assert answer.startswith(b"HTTP/1.1 408"), answer
    await c.idle()


@pytest.mark.parametrize("how", ["kept", "closed", "HTTP/1.0", "chunked"])
async def test_an_answer_before_the_whole_body_has_come_reaches_a_client_that_sends_on(
    c: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most clients send everything first and read then."""
    monkeypatch.setattr(http_module, "LINGER_SECONDS", 60.0)  # on a busy machine the rest takes its time
    large = b"x" * (24 << 20)
    if how == "chunked":
        large = b"%x\r\n" % len(large) + large + b"\r\n0\r\n\r\n"
    headers = ["Transfer-Encoding: chunked"] if how == "chunked" else []
    head = request(large, *headers, version=how[-3:] if "/" in how else "1.1", close=how == "closed")
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.port)
    writer.write(head)
    await writer.drain()
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert answer.startswith(b"HTTP/1.1 413"), answer
    length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert b"body_too_large" in await reader.readexactly(length)
    if how in ("kept", "chunked"):
        writer.write(request())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "the rest was no head"
    assert c.router._gate.counters()["http_heads_too_large"] == 0
    assert await reader.read() is not None and reader.at_eof()
    writer.close()
    await until(lambda: not c.router._gate.open)
    await c.idle()


async def test_the_rest_of_a_body_that_never_comes_is_not_waited_for(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "LINGER_SECONDS", 0.2)
    for close in (True, False):
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.port)
        writer.write(request(b"x", "Content-Length: 99999999", close=close))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        await asyncio.wait_for(reader.read(), 30)
        await until(lambda: not c.router._gate.open)  # although this client has not closed
        writer.close()


async def test_d7_connections_without_a_request_are_bounded_in_time_number_and_size(c: Cluster) -> None:
    gate: Gate = c.router._gate
    gate.most_headless = 3
    opened = [await asyncio.open_connection("127.0.0.1", c.router.port) for _ in range(5)]
    for _, writer in opened:
        writer.write(b"POST /v1/comp")
    await until(lambda: gate.counters()["http_heads_evicted"] == 2)
    assert (await c.chat()).status_code == 200, "a whole request is let in all the same"
    gate.seconds = 0.2
    opened += [await asyncio.open_connection("127.0.0.1", c.router.port) for _ in range(3)]
    await until(lambda: gate.counters()["http_heads_late"] == 3)
    for reader, _ in opened:
        assert await gone(reader)
    gate.seconds = http_module.HEAD_SECONDS
    _, large = await asyncio.open_connection("127.0.0.1", c.router.port)
    large.write(b"POST / HTTP/1.1\r\nX-A: " + b"a" * 100_000)
    await until(lambda: gate.counters()["http_heads_too_large"] == 1)
    for _, writer in (*opened, (None, large)):
        writer.close()
    await until(lambda: not gate.headless)
