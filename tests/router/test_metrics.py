"""The router's own numbers: as documented, started and ended the same at idle, times as the client has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics_doc import documented
from quiesce.api.chat import TextModel
from router.cluster import Cluster, body, cluster, until

pytestmark = pytest.mark.anyio

CLOCK = 0.01  # seconds: the event loop's time is that of its last turn


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as made:
        yield made


async def scrape(c: Cluster) -> dict[str, float]:
    """The sums over all labels."""
    answer = await c.client.get("/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_the_router_exports_what_is_documented_from_the_start_and_nothing_else(c: Cluster) -> None:
    answer = await c.client.get("/metrics")
    exported = {
        (sample.name.removeprefix("quiesce:"), family.type)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert exported == documented("Router")
    assert answer.text.count("quiesce:") > 50 and "quiesce_" not in answer.text


@dataclass
class Times:
    """Of one streamed answer, as its client and its worker have them."""

    asked: float = 0.0
    leg: float = 0.0  # came to the worker
    first_said: float = 0.0
    first_seen: float = 0.0
    last_said: float = 0.0
    over: float = 0.0


async def answered(c: Cluster, wait: float, between: float, tokens: int) -> Times:
    times = Times()

    async def speak() -> None:
        rid = await until(lambda: next(iter(c.decode.active), None))
        times.leg = time.monotonic()
        await asyncio.sleep(wait)
        for number in range(tokens):
            times.last_said = time.monotonic()
            times.first_said = times.first_said or times.last_said
            c.decode.tokens(rid, 40)
            if number < tokens - 1:
                await asyncio.sleep(between)
        c.decode.end(rid, "length")

    speaking = asyncio.create_task(speak())
    times.asked = time.monotonic()
    fields = body(stream=True, max_tokens=tokens)
    async with c.client.stream("POST", "/v1/chat/completions", json=fields) as answer:
        async for line in answer.aiter_lines():
            if not times.first_seen and '"content":"' in line and '"content":""' not in line:
                times.first_seen = time.monotonic()
    await speaking
    await c.idle()
    times.over = time.monotonic()
    assert times.first_seen
    return times


async def test_g107_times_are_those_that_the_client_sees(c: Cluster) -> None:
    times = await answered(c, wait=0.5, between=0.1, tokens=4)
    found = await scrape(c)
    # The router stands between worker and client: what it measures lies between what those two do, on any machine.
    for name, least, most in (
        ("time_to_first_token", times.first_said - times.leg, times.first_seen - times.asked),
        ("e2e_request_latency", times.last_said - times.leg, times.over - times.asked),
        ("time_per_output_token", (times.last_said - times.first_seen) / 3, (times.over - times.first_said) / 3),
    ):
        assert found[f"quiesce:{name}_seconds_count"] == 1
        assert least - CLOCK < found[f"quiesce:{name}_seconds_sum"] < most + CLOCK, name


async def test_g107_what_started_has_ended_whatever_became_of_it(c: Cluster) -> None:
    leaving = asyncio.create_task(c.chat())
    rid = await until(lambda: next(iter(c.decode.active), None))
    busy = await scrape(c)
    assert busy["quiesce:http_inflight"] == 1 and busy["quiesce:router_legs"] >= 1
    leaving.cancel()
    await until(lambda: c.decode.cancels)
    c.decode.hold = False
    assert (await c.chat()).status_code == 200
    assert (await c.chat(n=2)).status_code == 200
    assert (await c.chat(model="other")).status_code == 404
    assert (await c.client.post("/v1/completions", content=b"{")).status_code == 400
    c.decode.hold = True
    failing = asyncio.create_task(c.chat())
    rid = await until(lambda: next(iter(c.decode.active), None))
    c.decode.end(rid, "failed", 502, "the hand-off failed")
    assert (await failing).status_code == 502
    await c.idle()

    found = await scrape(c)
    assert found["quiesce:http_requests_started_total"] == found["quiesce:http_requests_total"] == 6
    assert found["quiesce:router_answers_started_total"] == found["quiesce:router_answers_ended_total"] == 5
    assert found["quiesce:http_inflight"] == found["quiesce:router_legs"] == 0
    assert found["quiesce:prompt_tokens_total"] > 0 and found["quiesce:generation_tokens_total"] == 12


async def test_debug_ledger_asks_every_worker_about_one_page(c: Cluster) -> None:
    answer = await c.client.get("/debug/ledger?page=17")
    assert answer.json() == {name: {"page": 17, "entries": []} for name in ("decode-0", "prefill-0")}
    for bad in ("-1", "x", "", "1" * 40, "1.5", "١"):
        refused = await c.client.get("/debug/ledger", params={"page": bad})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "page", bad
