"""Requests through the real router: the two legs, and what the client hears."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ports import free_port
from quiesce.api.chat import TextModel
from quiesce.core import messages
from quiesce.core.fingerprint import Limits
from router.cluster import body, cluster, until

pytestmark = pytest.mark.anyio


async def test_both_legs_get_one_start_with_one_room_and_the_decode_leg_names_its_prefill(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text) as c:
        answer = await c.chat(temperature=0.5, seed=7, top_p=0.9, top_k=3, max_tokens=2)
        assert answer.status_code == 200, answer.text
        await c.heard(1)
        (p,) = c.prefill.starts.values()
        (d,) = c.decode.starts.values()
        assert (p.rid, p.room, p.token_ids, p.sampling) == (d.rid, d.room, d.token_ids, d.sampling)
        assert d.prefill == c.prefill.address() and p.prefill is None
        assert p.router_epoch in c.prefill.router_epochs
        assert (d.sampling.temperature, d.sampling.seed, d.sampling.top_p, d.sampling.top_k) == (0.5, 7, 0.9, 3)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.headers["x-quiesce-request-id"] == p.rid
        await c.idle()
        assert not c.prefill.cancels and not c.decode.cancels


async def test_r1_client_gone_before_the_first_token_cancels_both_legs(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]) as c:
        for stream in (False, True):
            leaving = asyncio.create_task(c.client.post("/v1/chat/completions", json=body(stream=stream)))
            await until(lambda: c.prefill.active and c.decode.active)
            leaving.cancel()
            await c.idle()
        for worker in (c.prefill, c.decode):  # a cancel whose answer is late is said again
            assert {cancel.rid for cancel in worker.cancels} == set(worker.starts) and len(worker.starts) == 2
        assert set(c.prefill.starts) == set(c.decode.starts)
        assert "client" in c.prefill.cancels[0].reason


async def test_r1_client_gone_during_tokenisation_starts_nothing(
    tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizing, proceed, encode = asyncio.Event(), asyncio.Event(), TextModel.encode

    async def slow(self: TextModel, *given: Any) -> tuple[int, ...]:
        tokenizing.set()
        await proceed.wait()
        return await encode(self, *given)

    async with cluster(tmp_path, text) as c:
        monkeypatch.setattr(TextModel, "encode", slow)
        asking = asyncio.create_task(c.chat())
        await tokenizing.wait()
        asking.cancel()
        metric = c.router.front.metrics.requests.labels("/v1/chat/completions", "499")
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not c.router._server.server_state.connections)
        proceed.set()
        await c.idle()
        assert metric._value.get() == 1
        assert not c.decode.starts and not c.prefill.starts


async def test_r1_client_gone_in_the_middle_of_a_stream_cancels_the_decode_leg(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c:

        async def one_token() -> None:
            rid = await until(lambda: next(iter(c.decode.starts), None))
            await c.heard(1)
            await until(lambda: not c.router.dispatcher.registry.workers["prefill-0"].legs)
            c.decode.tokens(rid, 40)

        giving = asyncio.create_task(one_token())
        async with c.client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as answer:
            async for _ in answer.aiter_lines():
                break
        await giving
        await until(lambda: c.decode.cancels)
        await c.idle()
        assert not c.prefill.cancels  # its leg had ended by itself


async def test_r2_prefill_failure_ends_the_decode_leg_and_the_client_hears_at_once(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]) as c:
        for status in (503, 500):
            waiting = asyncio.create_task(c.chat())
            rid = await until(lambda: next(iter(c.prefill.active), None))
            await until(lambda rid=rid: rid in c.decode.active)
            c.prefill.end(rid, "failed", status, "out of pages")
            answer = await asyncio.wait_for(waiting, 20)  # long before its deadline
            assert answer.status_code == status
            assert "out of pages" in answer.json()["error"]["message"]
            await until(lambda rid=rid: any(cancel.rid == rid for cancel in c.decode.cancels))
            await c.idle()


async def test_r3_decode_failure_cancels_the_prefill_leg(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]) as c:
        waiting = asyncio.create_task(c.chat(stream=True))
        rid = await until(lambda: next(iter(c.decode.active), None))
        await until(lambda: rid in c.prefill.active)
        c.decode.end(rid, "refused", 503, "no room for holds")
        answer = await waiting
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        await until(lambda: c.prefill.cancels)
        await c.idle()


async def test_r4_the_router_asks_for_a_cancel_and_says_nothing_of_pages(tmp_path: Path, text: TextModel) -> None:
    """What ends a leg names the request alone: no message of the router can give a page back."""
    for message in (messages.Start, messages.Cancel, messages.Inspect, messages.Registered):
        assert not {"pages", "grant", "leg", "tid"} & set(message.__struct_fields__)
    async with cluster(tmp_path, text, [{"role": "prefill", "hold": True}, {"role": "decode", "deaf": True}]) as c:
        c.decode.hold = True
        leaving = asyncio.create_task(c.client.post("/v1/chat/completions", json=body()))
        await until(lambda: c.decode.active)
        leaving.cancel()
        # A worker that has not said its last word still counts, and is asked again.
        await until(lambda: len(c.decode.cancels) >= 2)
        worker = c.router.dispatcher.registry.workers["decode-0"]
        assert len(worker.legs) == 1
        c.decode.end(c.decode.cancels[0].rid, "cancelled")
        await c.idle()


async def test_d1_a_refused_prompt_reaches_no_worker(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text) as c:
        answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 512})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "512 tokens" in error["message"] and error["param"] == "prompt"
        too_many = {"model": "tiny", "prompt": [5] * 500, "max_tokens": 13}
        answer = await c.client.post("/v1/completions", json=too_many)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "max_tokens"
        assert all(number in error["message"] for number in ("13", "500", "512", "12"))
        assert not c.prefill.starts and not c.decode.starts
        answer = await c.client.post("/v1/completions", json=too_many | {"max_tokens": 12})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 12
        answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 500})
        assert answer.json()["usage"]["completion_tokens"] == 12  # the rest of the context


async def test_d3_the_limit_is_the_least_of_context_and_both_pools(tmp_path: Path, text: TextModel) -> None:
    workers = [
        {"role": "prefill", "limits": Limits(512, 100, 512)},
        {"role": "decode", "limits": Limits(512, 60, 512)},
    ]
    async with cluster(tmp_path, text, workers) as c:
        models = (await c.client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == 60
        answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 60})
        assert answer.status_code == 400 and "at most 60" in answer.json()["error"]["message"]
        health = (await c.client.get("/health")).json()
        assert health["context_limit"] == 60


async def test_d3_every_worker_is_told_the_limit_that_clients_are_shown(tmp_path: Path, text: TextModel) -> None:
    """It does not come and go with heartbeats, and it rises when a small worker is gone and the others know it."""
    workers = [{"role": "prefill"}, {"role": "decode"}, {"role": "decode", "limits": Limits(512, 60, 512)}]
    async with cluster(tmp_path, text, workers) as c:

        async def shown() -> tuple[int, int]:
            models, health = await c.client.get("/v1/models"), await c.client.get("/health")
            return models.json()["data"][0]["max_model_len"], health.json()["context_limit"]

        await until(lambda: all(worker.told_limits[-1:] == [60] for worker in c.workers))
        assert await shown() == (60, 60)
        operated = c.router.dispatcher.registry.workers["decode-1"]
        operated.drained = "for a while"
        assert await shown() == (60, 60), "it may come back at any moment"
        for worker in c.workers:
            worker.reported = {"agreed": 60}
        small = c.worker("decode-1")
        small.kill()
        c.exited(small)
        await until(lambda: c.decode.told_limits[-1] == c.prefill.told_limits[-1] == 512)
        assert await shown() == (60, 60), "they have not said that they know"
        answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 60})
        assert answer.status_code == 400 and "at most 60" in answer.json()["error"]["message"]
        c.prefill.reported = c.decode.reported = {"agreed": 512}
        await until(lambda: c.router.dispatcher.context_limit() == 512)
        assert await shown() == (512, 512)


async def test_d3_a_workers_own_port_goes_by_the_agreed_limit(tmp_path: Path, text: TextModel) -> None:
    """Both legs are refused there, at once and without a worker."""
    ports = {name: free_port() for name in ("prefill-0", "decode-0")}
    workers = [{"role": "prefill"}, {"role": "decode", "limits": Limits(512, 60, 512)}]
    async with cluster(tmp_path, text, workers, worker_ports=tuple(ports.items())) as c:
        took = []
        for port in ports.values():
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": ports["prefill-0"], "bootstrap_room": 7}
            body = {"input_ids": [5] * 60, "sampling_params": {"max_new_tokens": 4}, **room}
            models = await c.client.get(f"http://127.0.0.1:{port}/v1/models")
            assert models.json()["data"][0]["max_model_len"] == 60
            for _ in range(5):
                began = time.monotonic()
                answer = await c.client.post(f"http://127.0.0.1:{port}/generate", json=body)
                took.append(time.monotonic() - began)
                assert answer.status_code == 400 and "60" in answer.text, answer.text
        assert min(took[:5]) < 1 and min(took[5:]) < 1, "nothing is waited for"
        assert not c.prefill.starts and not c.decode.starts


async def test_d5_equal_client_ids_are_three_independent_requests(tmp_path: Path, text: TextModel) -> None:
    """Also scenario E19: the client's id is a label, echoed and never used to find anything."""
    reply = {"role": "decode", "reply": lambda start: start.token_ids[:3]}
    async with cluster(tmp_path, text, [{"role": "prefill"}, reply]) as c:

        async def ask(prompt: list[int]) -> httpx.Response:
            fields = {"model": "tiny", "prompt": prompt, "max_tokens": 3}
            return await c.client.post("/v1/completions", json=fields, headers={"x-request-id": "same"})

        answers = await asyncio.gather(ask([10, 11, 12, 13]), ask([20, 21, 22, 23]))
        answers.append(await ask([30, 31, 32, 33]))
        assert [a.headers["x-request-id"] for a in answers] == ["same"] * 3
        assert len({a.headers["x-quiesce-request-id"] for a in answers}) == 3
        decode = text._tokenizer.decode
        assert [a.json()["choices"][0]["text"] for a in answers] == [decode([n, n + 1, n + 2]) for n in (10, 20, 30)]


async def test_scenario_e70_requests_without_an_id_have_pairing_ids_of_their_own(
    tmp_path: Path, text: TextModel
) -> None:
    reply = {"role": "decode", "reply": lambda start: start.token_ids[:2]}
    async with cluster(tmp_path, text, [{"role": "prefill"}, reply]) as c:

        async def ask(i: int) -> None:
            headers = {"x-request-id": "equal"} if i % 2 else {}
            prompt = [4 + i, 5 + i, 6 + i]
            fields = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
            answer = await c.client.post("/v1/completions", json=fields, headers=headers)
            assert answer.json()["choices"][0]["text"] == text._tokenizer.decode(prompt[:2])

        for block in range(0, 300, 50):
            await asyncio.gather(*(ask(block + i) for i in range(50)))
        assert len({start.room for start in c.decode.starts.values()}) == 300
        assert len({start.rid for start in c.decode.starts.values()}) == 300


async def test_scenario_f31_a_failure_after_the_first_byte_ends_the_stream_without_a_terminator(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c:

        async def run(tokens: int, stream: bool) -> tuple[int, str]:
            waiting = asyncio.create_task(c.chat(stream=stream, max_tokens=9))
            rid = await until(lambda: next(iter(c.decode.active), None))
            for _ in range(tokens):
                c.decode.tokens(rid, 40)
            call = c.router.dispatcher._calls[rid]
            await until(lambda: call.machine.tokens == tokens and not call._tokens)
            c.decode.end(rid, "failed", 500, "the hand-off broke")
            answer = await waiting
            await c.idle()
            return answer.status_code, answer.text

        status, said = await run(5, stream=True)
        assert status == 200 and "[DONE]" not in said
        last = json.loads(said.strip().split("data: ")[-1])
        assert "the hand-off broke" in last["error"]["message"]
        assert {piece["finish_reason"] for piece in choices(said)} == {None}
        for tokens, stream in ((0, True), (0, False), (5, False)):
            status, said = await run(tokens, stream)
            assert status == 500 and "the hand-off broke" in json.loads(said)["error"]["message"]


def choices(events: str) -> list[dict[str, Any]]:
    frames = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return [choice for frame in frames for choice in json.loads(frame).get("choices", [])]


@pytest.mark.parametrize("stream", [False, True])
async def test_scenario_f83_max_tokens_is_exact(tmp_path: Path, text: TextModel, stream: bool) -> None:
    async with cluster(tmp_path, text) as c:
        for n in (1, 2, 3):
            answer = await c.chat(max_tokens=n, stream=stream)
            if stream:
                pieces = choices(answer.text)
                said = "".join(piece["delta"].get("content", "") for piece in pieces)
                assert pieces[-1]["finish_reason"] == "length"
            else:
                said = answer.json()["choices"][0]["message"]["content"]
                assert answer.json()["usage"]["completion_tokens"] == n
            assert said == text._tokenizer.decode([40] * n)


async def test_tokens_lost_on_the_way_are_an_error_and_not_a_shorter_answer(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c:
        waiting = asyncio.create_task(c.chat())
        rid = await until(lambda: next(iter(c.decode.active), None))
        c.decode.tokens(rid, 40)
        c.decode.counts[rid] += 1
        c.decode.end(rid, "length")
        answer = await waiting
        assert answer.status_code == 500 and "1 of 2" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("server", "own", "most"),
    [({"request_timeout": 1.0}, {}, 1000), ({}, {"timeout": 1}, 1000)],
    ids=["server", "request"],
)
async def test_the_deadline_answers_504_and_cancels_both_legs(
    tmp_path: Path, text: TextModel, server: dict[str, float], own: dict[str, float], most: int
) -> None:
    held = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, held, **server) as c:
        for _ in range(20):  # a second may be over before the legs have begun
            answer = await c.chat(**own)
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
            await c.idle()
            if c.prefill.starts and c.decode.starts:
                break
        assert c.prefill.cancels and c.decode.cancels
        assert 0 < c.decode.starts[c.decode.cancels[0].rid].deadline_ms <= most


async def test_work_beyond_the_places_is_refused_with_retry_after(tmp_path: Path, text: TextModel) -> None:
    held = [{"role": "prefill"}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, held, max_inflight=2) as c:
        waiting = [asyncio.create_task(c.chat()) for _ in range(2)]
        await until(lambda: len(c.decode.active) == 2)
        answer = await c.chat()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "overloaded"
        for rid, start in list(c.decode.starts.items()):
            c.decode.tokens(rid, *[40] * start.sampling.max_tokens)
            c.decode.end(rid, "length")
        assert [(await w).status_code for w in waiting] == [200, 200]


async def test_a_worker_is_given_no_more_than_it_says_it_takes(tmp_path: Path, text: TextModel) -> None:
    held = [{"role": "prefill"}, {"role": "decode", "hold": True, "limits": Limits(512, 4096, 1)}]
    async with cluster(tmp_path, text, held) as c:
        waiting = asyncio.create_task(c.chat())
        rid = await until(lambda: next(iter(c.decode.active), None))
        answer = await c.chat()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert (await c.client.get("/health")).status_code == 200
        c.decode.end(rid, "cancelled", 500)
        assert (await waiting).status_code == 500


async def test_a_stop_string_ends_the_answer_and_cancels_the_leg(tmp_path: Path, text: TextModel) -> None:
    ids = text._tokenizer.encode("one two END three").ids
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c:
        waiting = asyncio.create_task(c.chat(stop=["END", "never"], max_tokens=50))
        rid = await until(lambda: next(iter(c.decode.active), None))
        c.decode.tokens(rid, *ids)
        answer = (await waiting).json()
        assert answer["choices"][0]["message"]["content"] == "one two "
        assert answer["choices"][0]["finish_reason"] == "stop"
        counted = answer["usage"]["completion_tokens"]
        assert "END" in text._tokenizer.decode(ids[:counted])
        assert "END" not in text._tokenizer.decode(ids[: counted - 1])
        await c.idle()
        assert {cancel.rid for cancel in c.decode.cancels} == {rid}


async def test_usage_reports_the_cached_tokens(tmp_path: Path, text: TextModel) -> None:
    workers = [{"role": "prefill"}, {"role": "decode", "cached_tokens": 16}]
    async with cluster(tmp_path, text, workers) as c:
        fields = body(stream=True, stream_options={"include_usage": True})
        answer = await c.client.post("/v1/chat/completions", json=fields)
        assert answer.text.endswith("data: [DONE]\n\n")
        usage = json.loads(answer.text.strip().split("data: ")[-2])["usage"]
        (start,) = c.decode.starts.values()
        assert usage["prompt_tokens"] == len(start.token_ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_colocated_worker_serves_alone(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "colocated"}]) as c:
        assert (await c.chat()).status_code == 200
        (start,) = c.worker("colocated-0").starts.values()
        assert start.prefill is None


async def test_draining_refuses_new_work_lets_running_work_end_and_then_cuts_it(
    tmp_path: Path, text: TextModel
) -> None:
    held = [{"role": "prefill"}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, held, drain_timeout=4.0) as c:
        good, slow = [asyncio.create_task(c.chat()) for _ in range(2)]
        await until(lambda: len(c.decode.active) == 2)
        c.router.stop()
        answer = await c.chat()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert (await c.client.get("/health")).status_code == 503
        rid = next(iter(c.decode.active))
        c.decode.tokens(rid, *[40] * 4)
        c.decode.end(rid, "length")
        statuses = sorted([(await good).status_code, (await slow).status_code])
        assert statuses == [200, 503]
        await until(lambda: c.decode.cancels)
