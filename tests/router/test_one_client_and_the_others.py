"""What one client can cost the others at the HTTP port: it is bounded, whatever it sends, and ends when it leaves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from quiesce.api import body as body_module
from quiesce.api import schemas
from quiesce.api.chat import TextModel
from quiesce.api.tools import MAX_CALLED
from quiesce.router.http import MOST_PIPELINED, Gate
from router.cluster import MODEL, Cluster, cluster, until
from router.test_http_edges import STREAM, gone, request, talk

pytestmark = pytest.mark.anyio

HELD = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]
HALF = request()[:-3]
PAGE = request(b"", path="/ready", method="GET", close=False)


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text) as made:
        yield made


@pytest.fixture
async def held(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text, HELD) as made:
        yield made


async def opened(c: Cluster, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", c.router.port)
    for piece in pieces:
        writer.write(piece)
    return reader, writer


async def test_r1_a_client_that_leaves_with_requests_in_the_queue_of_its_connection_ends_the_running_one(
    held: Cluster,
) -> None:
    for asked in (request(close=False), request(STREAM, close=False)):
        started, cancelled = len(held.decode.starts), len(held.decode.cancels)
        _, writer = await opened(held, asked, asked, asked)
        await until(lambda n=started: len(held.decode.starts) == n + 1)
        writer.close()
        await until(lambda n=cancelled: len(held.decode.cancels) > n)
        await held.idle()
        assert len(held.decode.starts) == started + 1, "what waited was never begun"


async def test_d7_requests_that_wait_on_one_connection_are_bounded(held: Cluster) -> None:
    gate: Gate = held.router._gate
    reader, writer = await opened(held, request(close=False), *[PAGE] * MOST_PIPELINED)
    await until(lambda: held.decode.starts)
    assert not gate.counters()["http_requests_invalid"]
    writer.write(PAGE)
    assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400")
    writer.close()
    assert gate.counters()["http_requests_invalid"] == 1
    await held.idle()
    assert held.decode.cancels, "the one that ran has ended with its connection"
    await until(lambda: not gate.open)


async def test_d7_connections_without_a_whole_request_make_room_the_oldest_first(held: Cluster) -> None:
    gate: Gate = held.router._gate
    running = await opened(held, request(STREAM))
    await until(lambda: held.decode.active and held.prefill.active)
    between, half = await opened(held, PAGE), await opened(held, HALF)
    assert b"200 OK" in await between[0].readuntil(b"}")
    await until(lambda: len(gate.spare) == 2)
    gate.most = gate.open
    fresh = await opened(held, PAGE)
    assert await gone(between[0]), "the oldest of those two"
    assert b"200 OK" in await fresh[0].readuntil(b"}")
    other = await opened(held, PAGE)
    assert await gone(half[0]) and b"200 OK" in await other[0].readuntil(b"}")
    assert gate.counters()["http_spare_evicted"] == 2
    held.decode.answer(next(iter(held.decode.starts.values())))
    held.prefill.end(next(iter(held.prefill.active)), "handed_over")
    assert b"[DONE]" in await asyncio.wait_for(running[0].read(), 30), "one with a request is left alone"
    for _, writer in (running, between, half, fresh, other):
        writer.close()
    await until(lambda: not gate.spare and not gate.open)


async def test_d7_a_half_body_takes_no_place(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, max_inflight=1) as c:
        halves = [await opened(c, HALF) for _ in range(3)]
        await until(lambda: len(c.router._gate.spare) == 3)
        assert (await c.chat()).status_code == 200
        for _, writer in halves:
            writer.close()
        await c.idle()


async def test_d7_large_bodies_that_arrive_have_one_budget_and_small_ones_need_none(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = c.router.front.bodies
    whole = bodies.room
    bodies.room = 300_000
    most = body_module.SMALL + 200_000
    large = request(b"[" * 400_000, close=False)
    half = await opened(c, large[:most])
    await until(lambda: bodies.room < 150_000)
    answer = await talk(c, large)
    assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: " in answer and b"large bodies" in answer
    assert (await c.chat()).status_code == 200
    half[1].close()
    await until(lambda: bodies.room == 300_000)
    bodies.room = whole
    assert (await talk(c, large)).startswith(b"HTTP/1.1 400")
    assert bodies.room == whole


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
async def test_the_loop_goes_on_while_a_large_body_is_read(
    c: Cluster, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """It takes seconds, streams wait for the loop, and workers whose heartbeats it does not hear look dead."""
    text = c.router.front.text
    parsed, on_the_loop = text.parsed, list[bool]()

    async def spied(parse: Callable[[bytes], Any], raw: bytes) -> Any:
        def told(raw: bytes) -> Any:
            on_the_loop.append(threading.current_thread() is threading.main_thread())
            return parse(raw)

        return await parsed(told, raw)

    monkeypatch.setattr(text, "parsed", spied)
    for prompt in ("a", [40] * 500_000):
        await c.client.post(route, json={"model": MODEL, "prompt": prompt})
    assert on_the_loop == [True, False]


async def test_a_prompt_of_too_many_ids_is_refused_before_each_is_looked_at(c: Cluster) -> None:
    asked = {"model": MODEL, "prompt": [-1] * 600, "max_tokens": 1}
    answer = await c.client.post("/v1/completions", json=asked)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_number_of_messages_is_bounded(c: Cluster) -> None:
    answer = await c.chat(messages=[{"role": "user", "content": ""}] * (schemas.MAX_MESSAGES + 1))
    assert answer.status_code == 400 and str(schemas.MAX_MESSAGES) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[1]," * (schemas.MAX_NESTED + 1), "brackets"),
        (b"1," * (schemas.MAX_VALUES + 1), "commas"),
    ],
    ids=["lists", "numbers"],
)
async def test_the_parts_of_a_body_are_counted_before_it_is_read(c: Cluster, raw: bytes, says: str) -> None:
    answer = await c.client.post("/v1/completions", content=b'{"model": "tiny", "prompt": [' + raw + b"1]}")
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "too_many_parts"


async def test_what_a_template_writes_of_calls_and_tools_counts_as_the_prompt_does(c: Cluster) -> None:
    """Before it is made into tokens, which takes two hundred times its bytes."""

    def asked(size: int) -> dict[str, Any]:
        arguments = json.dumps({"a": "x" * size})
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hi"}]}

    for size, says in ((50_000, "the prompt has at least"), (MAX_CALLED, "the arguments of calls")):
        answer = await c.chat(**asked(size))
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    for size, says in ((50_000, "the prompt has at least"), (MAX_CALLED, "tools: may have")):
        tool = {"type": "function", "function": {"name": "f", "description": "x" * size}}
        answer = await c.chat(tools=[tool])
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


async def test_test_requests_that_many_ask_for_at_once_are_one(c: Cluster) -> None:
    c.decode.passes = None  # it answers when it is told
    asking = [asyncio.create_task(c.client.get("/health?probe=1")) for _ in range(20)]
    worker = c.router.dispatcher.registry.workers["decode-0"]
    await until(lambda: worker.probes)
    answered = c.router.dispatcher.registry.workers["prefill-0"]
    await until(lambda: answered.probe_answered)
    await asyncio.sleep(0)
    assert len(worker.probes) == 1
    for waiting in asking:
        waiting.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_refused_request_is_not_charged(tmp_path: Path, text: TextModel) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text('[[key]]\ntenant = "a"\nkey = "sk-0123456789abcdef"\ntokens_per_minute = 5\n')
    keys.chmod(0o600)
    asked = {"model": MODEL, "prompt": [40] * 20, "max_tokens": 1}
    async with cluster(tmp_path, text, api_keys=keys) as c:
        headers = {"authorization": "Bearer sk-0123456789abcdef"}
        for worker in c.router.dispatcher.registry.workers.values():
            worker.drained = "an operator drains it"
        for _ in range(2):
            answer = await c.client.post("/v1/completions", content=json.dumps(asked), headers=headers)
            assert answer.status_code == 503
        for worker in c.router.dispatcher.registry.workers.values():
            worker.drained = ""
        assert (await c.client.post("/v1/completions", json=asked, headers=headers)).status_code == 200
        assert (await c.client.post("/v1/completions", json=asked, headers=headers)).status_code == 429
