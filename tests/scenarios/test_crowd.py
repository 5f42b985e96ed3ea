"""Five hundred clients stream at the same time from one server, and all leave at the same time."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from e2e.product import Product, until
from scenarios.asking import COMPLETIONS, ask, joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

CLIENTS = 500
ANSWER = 8
PROMPTS = [[30 + i] * (1 + 9 * i) for i in range(10)]
IDLE_WITHIN = 2.0


def body(pd: Product, index: int, tokens: int) -> dict[str, Any]:
    asked = {"model": pd.name, "prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": tokens, "stream": True}
    return asked | {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}


def client_for(pd: Product) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=pd.url, timeout=120, limits=limits)


async def stream_all(pd: Product) -> list[dict[str, Any]]:
    async def one(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
        async with client.stream("POST", COMPLETIONS, json=body(pd, index, ANSWER)) as answer:
            assert answer.status_code == 200, await answer.aread()
            return joined([line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")])

    async with client_for(pd) as client:
        return await asyncio.gather(*(one(client, index) for index in range(CLIENTS)))


async def leave_together(pd: Product) -> float:
    """Every stream is open and some have text when all connections close. Returns when they had."""
    async with AsyncExitStack() as open_streams, client_for(pd) as client, client_for(pd) as observer:

        async def enter(index: int) -> httpx.Response:
            return await open_streams.enter_async_context(
                client.stream("POST", COMPLETIONS, json=body(pd, index, 300))
            )

        entering = [asyncio.ensure_future(enter(index)) for index in range(CLIENTS)]
        done, waiting = await asyncio.wait(entering, return_when=asyncio.FIRST_COMPLETED)
        async for line in next(iter(done)).result().aiter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["choices"]:
                break
        while legs(await observer.get("/metrics")) < CLIENTS:
            await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return time.monotonic()


def legs(page: httpx.Response) -> float:
    """Requests that the front is serving now."""
    for line in page.text.splitlines():
        if line.startswith("quiesce:http_inflight "):
            return float(line.split()[1])
    raise AssertionError("no gauge of requests in flight")


def test_five_hundred_streams_without_an_error_and_none_left_when_all_leave(pd: Product) -> None:
    right = [ask(pd, COMPLETIONS, {"prompt": p, "max_tokens": ANSWER, "ignore_eos": True}, True) for p in PROMPTS]
    pd.check_idle()
    boot = pd.ledger()
    answers = asyncio.run(stream_all(pd))
    assert len(answers) == CLIENTS
    for index, answer in enumerate(answers):
        assert {"status": 200, **answer} == right[index % len(PROMPTS)]
    pd.check_idle(boot)
    left = asyncio.run(leave_together(pd))
    until(lambda: not pd.busy(boot), IDLE_WITHIN + left - time.monotonic(), "the idle check after all have left")
    assert ask(pd, COMPLETIONS, {"prompt": PROMPTS[3], "max_tokens": ANSWER, "ignore_eos": True}, True) == right[3]
