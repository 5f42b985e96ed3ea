"""The HTTP side over real connections: the official client, bad input, limits, pages for operators."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quiesce.api.chat import TextModel
from quiesce.core.messages import Sample, Sampling, Start
from quiesce.ops.logs import TextLines
from router.cluster import Cluster, body, cluster, until

pytestmark = pytest.mark.anyio


def echo(start: Start) -> tuple[int, ...]:
    return start.token_ids


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "reply": echo}]) as made:
        yield made


def client_of(c: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_chats_completes_and_streams(c: Cluster, text: TextModel) -> None:
    async with client_of(c) as client:
        messages: Any = [{"role": "user", "content": "héllo 漢字 🙂"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=200)
        templated = text._wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = text._tokenizer.decode(text._tokenizer.encode(templated, add_special_tokens=False).ids)
        assert whole.choices[0].message.content == expected and "héllo 漢字 🙂" in expected
        assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
        assert whole.usage.prompt_tokens == whole.usage.completion_tokens
        assert whole.id.startswith("chatcmpl-")

        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=200, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])

        completion = await client.completions.create(model="tiny", prompt="plain text", max_tokens=100)
        assert completion.choices[0].text == "plain text" and completion.id.startswith("cmpl-")
        pieces = await client.completions.create(model="tiny", prompt="plain text", max_tokens=3, stream=True)
        got = [piece.choices[0] async for piece in pieces]
        assert got[-1].finish_reason == "length"
        assert "".join(piece.text for piece in got) == text._tokenizer.decode(
            text._tokenizer.encode("plain text").ids[:3]
        )
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).to_dict()["max_model_len"] == 512


async def test_the_official_client_hears_a_failure_in_the_middle_as_an_error(tmp_path: Path, text: TextModel) -> None:
    async with (
        cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c,
        client_of(c) as client,
    ):

        async def fail() -> None:
            rid = await until(lambda: next(iter(c.decode.active), None))
            c.decode.tokens(rid, 40)
            await until(lambda: c.router.dispatcher._calls[rid].machine.tokens == 1)
            await asyncio.sleep(0)
            c.decode.end(rid, "failed", 500, "the transfer broke")

        failing = asyncio.create_task(fail())
        messages: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(openai.APIError, match="the transfer broke"):
            stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
            async for _ in stream:
                pass
        await failing


async def test_the_official_client_stops_in_the_middle(tmp_path: Path, text: TextModel) -> None:
    async with (
        cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c,
        client_of(c) as client,
    ):

        async def one_token() -> None:
            c.decode.tokens(await until(lambda: next(iter(c.decode.active), None)), 40)

        giving = asyncio.create_task(one_token())
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await giving
        await until(lambda: c.decode.cancels)
        await c.idle()


async def test_bad_input_is_a_4xx_in_milliseconds_and_reaches_no_worker(c: Cluster) -> None:
    loop = asyncio.get_running_loop()
    chat, completion = "/v1/chat/completions", "/v1/completions"
    cases: list[tuple[str, bytes, int, str | None]] = [
        (chat, b"{", 400, None),
        (chat, b"\xff\xfe\x00", 400, None),
        (chat, json.dumps(body(model="other")).encode(), 404, "model"),
        (chat, json.dumps(body(temperature=-1)).encode(), 400, "temperature"),
        (chat, json.dumps(body(max_tokens=10**12)).encode(), 400, "max_tokens"),
        (chat, json.dumps(body(max_tokens=511)).encode(), 400, "max_tokens"),
        (chat, json.dumps(body(messages=[{"role": "user", "content": "x" * 3000}])).encode(), 400, "messages"),
        (completion, json.dumps({"model": "tiny", "prompt": ""}).encode(), 400, "prompt"),
        (completion, json.dumps({"model": "tiny", "prompt": [512]}).encode(), 400, "prompt"),
        (completion, json.dumps({"model": "tiny", "prompt": [10**40]}).encode(), 400, "prompt"),
        (
            completion,
            json.dumps({"model": "tiny", "prompt": "x", "logit_bias": {"512": 1}}).encode(),
            400,
            "logit_bias",
        ),
        (chat, json.dumps(body(stop_token_ids=[512])).encode(), 400, "stop_token_ids"),
        (chat, json.dumps(body(stop_token_ids=[-1])).encode(), 400, "stop_token_ids"),
        (chat, json.dumps(body(min_tokens=5)).encode(), 400, "min_tokens"),
        (completion, json.dumps({"model": "tiny", "prompt": "word " * 1_000_000}).encode(), 400, "prompt"),
    ]
    times = []
    for path, raw, status, param in cases:
        began = loop.time()
        answer = await c.client.post(path, content=raw)
        times.append(loop.time() - began)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (raw[:80], answer.text)
        assert error["type"] == "invalid_request_error" and error["message"]
    assert statistics.median(times) < 0.5 and max(times) < 5, "on any machine"
    assert not c.prefill.starts and not c.decode.starts
    assert (await c.chat()).status_code == 200


async def test_scenario_d44_bad_requests_do_not_make_workers_unusable(c: Cluster) -> None:
    for _ in range(20):
        assert (await c.chat(messages=[{"role": "user", "content": "x" * 3000}])).status_code == 400
    assert (await c.client.get("/health")).status_code == 200
    assert (await c.chat()).status_code == 200


async def test_every_sampling_field_reaches_both_workers(c: Cluster) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -5,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "min_tokens": 2,
        "ignore_eos": True,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 4,
        "prompt_logprobs": 1,
    }
    answer = await c.chat(**fields, logit_bias={"11": -100, "5": 2.5}, stop_token_ids=[9], priority=-3)
    assert answer.status_code == 200, answer.text
    expected = Sampling(
        **{name: value for name, value in fields.items() if name not in ("logprobs", "top_logprobs")},
        logit_bias=((5, 2.5), (11, -100.0)),
        stop_token_ids=(9,),
        logprobs=4,
    )
    for worker in (c.prefill, c.decode):
        (start,) = worker.starts.values()
        assert start.sampling == expected and start.priority == -3
    assert set(msgspec.structs.asdict(expected)) - set(fields) == {"logit_bias", "stop_token_ids", "grammar"}


async def test_a_request_is_logged_once_with_its_ids(c: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quiesce.api.generate")
    good = await c.client.post("/v1/chat/completions", json=body(), headers={"x-request-id": "mine"})
    bad = await c.client.post("/v1/chat/completions", json=body(n=0), headers={"x-request-id": "other"})
    await c.idle()
    for answer, label, status in ((good, "mine", 200), (bad, "other", 400)):
        rid = answer.headers["x-quiesce-request-id"]
        (record,) = [record for record in caplog.records if getattr(record, "rid", None) == rid]
        line = TextLines().format(record)
        assert f": {status}, " in line and line.endswith(f"rid={rid} client_id={label}")


async def test_a_body_over_the_limit_is_413_whether_or_not_it_says_so(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, max_body=2000) as c:
        answer = await c.client.post("/v1/completions", content=b"x" * 2001)
        assert answer.status_code == 413 and "2000 bytes" in answer.json()["error"]["message"]

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 900

        answer = await c.client.post("/v1/completions", content=chunks())
        assert answer.status_code == 413
        assert (await c.chat()).status_code == 200


async def test_unknown_paths_and_methods_have_the_same_shape(c: Cluster) -> None:
    answer = await c.client.get("/v1/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"
    answer = await c.client.get("/v1/completions")
    assert answer.status_code == 405 and "GET /v1/completions" in answer.json()["error"]["message"]
    answer = await c.client.get("/v1/models/other/name")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


async def test_ignored_fields_are_named_in_a_warning_and_labels_are_checked(c: Cluster) -> None:
    headers = {"x-request-id": "my-id"}
    answer = await c.client.post("/v1/chat/completions", json=body(user="me", store=True), headers=headers)
    assert answer.status_code == 200 and answer.headers["warning"] == '299 - "ignored: user, store"'
    assert answer.headers["x-request-id"] == "my-id"
    for bad in ("a b", "x" * 200, "é"):
        answer = await c.client.post(
            "/v1/chat/completions", json=body(), headers=[(b"x-request-id", bad.encode("latin-1"))]
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == answer.headers["x-quiesce-request-id"]


async def test_null_bytes_and_special_words_in_a_prompt_are_fine(c: Cluster) -> None:
    prompt = "a\x00b 👩‍👩‍👧"
    answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 99})
    assert answer.json()["choices"][0]["text"] == prompt


async def test_health_says_what_is_missing(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "decode"}]) as c:
        answer = await c.client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["missing"] == ["no prefill worker is usable"]
        assert answer.json()["roles"]["decode"] == {"registered": 1, "usable": 1}
        refused = await c.chat()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "no prefill worker" in refused.json()["error"]["message"]
        assert (await c.client.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        await c.add("prefill")
        await c.usable()
        answer = await c.client.get("/health")
        assert answer.status_code == 200 and answer.json()["status"] == "ok"
        assert [worker["trouble"] for worker in answer.json()["workers"]] == [None, None]


async def test_metrics_hold_the_routers_own_and_the_workers_samples(tmp_path: Path, text: TextModel) -> None:
    samples = [
        Sample("quiesce_pages", "gauge", "Pages by state.", (("state", "free"),), 7.0),
        Sample("quiesce_holds_total", "counter", "Holds.", (), 3.0),
        Sample("quiesce_step_seconds_bucket", "histogram", "Steps.", (("le", "+Inf"),), 2.0),
        Sample("quiesce_step_seconds_sum", "histogram", "Steps.", (), 0.5),
        Sample("quiesce_step_seconds_count", "histogram", "Steps.", (), 2.0),
        Sample("not a name", "gauge", "", (), 1.0),
    ]
    workers = [{"role": role, "samples": samples} for role in ("prefill", "decode")]
    async with cluster(tmp_path, text, workers) as c:
        await c.chat()
        answer = await c.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
        for worker in ("prefill-0", "decode-0"):
            assert found["quiesce_pages", (("state", "free"), ("worker", worker))] == 7
            assert found["quiesce_holds_total", (("worker", worker),)] == 3
            assert found["quiesce_step_seconds_bucket", (("le", "+Inf"), ("worker", worker))] == 2
            assert found["quiesce:worker_answers", (("worker", worker),)] == 1
            assert found["quiesce:router_legs", (("worker", worker),)] == 0
        route = (("route", "/v1/chat/completions"), ("status", "200"))
        assert found["quiesce:http_requests_total", route] == 1
        assert found["quiesce:generation_tokens_total", ()] == 4
        assert found["quiesce:router_requests_begun_total", ()] == 1
        assert found["quiesce:http_inflight", ()] == 0


async def test_debug_ledger_shows_each_workers_state(c: Cluster) -> None:
    answer = await c.client.get("/debug/ledger")
    assert answer.json() == {name: {"pages": {"free": 7}} for name in ("decode-0", "prefill-0")}


async def test_a_client_that_sends_half_a_body_and_leaves_holds_nothing(c: Cluster) -> None:
    stream = await anyio.connect_tcp("127.0.0.1", c.router.port)
    await stream.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await until(lambda: c.router._gate.spare)
    await stream.aclose()
    await until(lambda: not c.router._gate.open)
    await c.idle()
    assert not c.decode.starts


async def test_many_streams_at_once_keep_their_own_text(c: Cluster) -> None:
    async def one(i: int) -> None:
        prompt = f"stream {i} says {i * 7}"
        fields = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "stream": True}
        answer = await c.client.post("/v1/completions", json=fields)
        frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames) == prompt

    for block in range(3):
        await asyncio.gather(*(one(block * 30 + i) for i in range(30)))
    await c.idle()
    assert c.router.dispatcher.counters()["late_messages"] == 0
