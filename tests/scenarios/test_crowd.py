"""Five hundred clients stream at the same time from one server, and all leave at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from e2e.product import Product, until
from e2e.streams import Stream
from scenarios.asking import COMPLETIONS, ask, joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ANSWER = 8
PROMPTS = [[30 + i] * (1 + 9 * i) for i in range(10)]


def body(pd: Product, index: int) -> dict[str, Any]:
    asked = {"model": pd.name, "prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": ANSWER, "stream": True}
    return asked | {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}


async def stream_all(pd: Product, clients: int) -> list[dict[str, Any]]:
    async def one(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
        async with client.stream("POST", COMPLETIONS, json=body(pd, index)) as answer:
            assert answer.status_code == 200, await answer.aread()
            return joined([line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")])

    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=pd.url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(one(client, index) for index in range(clients)))


def leave_together(pd: Product, clients: int) -> None:
    """All of them are in the server and some have text when all connections close."""
    streams = [Stream(pd, PROMPTS[index % len(PROMPTS)], 400) for index in range(clients)]
    streams[0].until_event()
    until(lambda: pd.metrics()["quiesce:http_inflight"] > 0.9 * clients, 60, "the crowd to be in")
    for stream in streams:
        stream.close()


def fences(pd: Product) -> int:
    return sum(state["closed_by"].get("fenced", 0) for state in pd.ledger().values())


@pytest.mark.parametrize("clients", [200, pytest.param(500, marks=pytest.mark.long)])
def test_streams_without_an_error_and_none_left_when_all_leave(pd: Product, clients: int) -> None:
    right = [ask(pd, COMPLETIONS, {"prompt": p, "max_tokens": ANSWER, "ignore_eos": True}, True) for p in PROMPTS]
    pd.check_idle()
    boot = pd.ledger()
    answers = asyncio.run(stream_all(pd, clients))
    assert len(answers) == clients
    for index, answer in enumerate(answers):
        assert {"status": 200, **answer} == right[index % len(PROMPTS)]
    pd.check_idle(boot)
    before = fences(pd)
    leave_together(pd, clients)
    pd.check_idle(boot)
    assert fences(pd) == before, "nobody had to wait for the hold timeout"
    assert ask(pd, COMPLETIONS, {"prompt": PROMPTS[3], "max_tokens": ANSWER, "ignore_eos": True}, True) == right[3]
