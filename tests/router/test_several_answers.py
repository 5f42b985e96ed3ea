"""`n` and lists of prompts: one request of the client, many of the workers, one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quiesce.api.chat import TextModel
from quiesce.core.fingerprint import Limits
from quiesce.core.messages import Drawn, Start
from router.cluster import Cluster, body, cluster, until

pytestmark = pytest.mark.anyio


def reply(start: Start) -> list[int]:
    """The prompt's first token, then one that tells the seed."""
    return [start.token_ids[0], 300 + start.sampling.seed % 100]


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "reply": reply}]) as made:
        yield made


@pytest.fixture
async def held(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    held = [{"role": "prefill"}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, held) as made:
        yield made


def texts(events: str) -> tuple[dict[int, str], dict[int, str]]:
    """Index -> text, index -> finish reason of a stream of completions."""
    frames = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    said: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for frame in frames for choice in frame["choices"]):
        assert choice["index"] not in reasons  # nothing follows a finish reason
        said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    return said, reasons


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_times_samples_have_their_index_seed_room_and_one_usage(
    c: Cluster, text: TextModel, stream: bool
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": [[40, 1], "b", [42, 2, 3]], "n": 2, "seed": 7}
    fields |= {"max_tokens": 9, "temperature": 1, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await c.client.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    firsts = [40, 40, *(text._tokenizer.encode("b").ids * 2), 42, 42]
    expected = [text._tokenizer.decode([first, 307 + i % 2]) for i, first in enumerate(firsts)]
    if stream:
        said, reasons = texts(answer.text)
        assert [said[i] for i in range(6)] == expected and reasons == dict.fromkeys(range(6), "stop")
        usage = json.loads(answer.text.strip().split("data: ")[-2])["usage"]
    else:
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
        assert [choice["text"] for choice in answer.json()["choices"]] == expected
        usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 + 1 + 3, 12)
    rid = answer.headers["x-quiesce-request-id"]
    assert list(c.decode.starts) == [f"{rid}-{i}" for i in range(6)]
    assert len({start.room for start in c.decode.starts.values()}) == 6
    await c.heard(6)
    assert {start.room for start in c.prefill.starts.values()} == {start.room for start in c.decode.starts.values()}
    await c.idle()


async def test_without_a_seed_no_two_answers_have_one(c: Cluster) -> None:
    fields = {"model": "tiny", "prompt": ["a", "a"], "n": 4, "max_tokens": 9, "temperature": 1}
    assert (await c.client.post("/v1/completions", json=fields)).status_code == 200
    assert len({start.sampling.seed for start in c.decode.starts.values()}) == 8


async def test_a_list_of_prompts_draws_as_each_alone(c: Cluster) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "temperature": 1, "seed": 2**63 - 1}
    answer = await c.client.post("/v1/completions", json=fields | {"prompt": ["a", "b"], "n": 2})
    alone = [await c.client.post("/v1/completions", json=fields | {"prompt": prompt}) for prompt in "ab"]
    several = [choice["text"] for choice in answer.json()["choices"]]
    assert [several[0], several[2]] == [one.json()["choices"][0]["text"] for one in alone]
    assert {start.sampling.seed for start in c.decode.starts.values()} == {2**63 - 1, -(2**63)}  # it wraps


async def test_the_official_client_gets_n_chats(c: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, n=3, max_tokens=5)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        stream = await client.chat.completions.create(model="tiny", messages=messages, n=3, max_tokens=5, stream=True)
        chunks = [choice async for chunk in stream for choice in chunk.choices]
        assert sorted(choice.index for choice in chunks if choice.delta.role) == [0, 1, 2]
        assert sorted(choice.index for choice in chunks if choice.finish_reason) == [0, 1, 2]


async def started(c: Cluster, count: int) -> list[str]:
    await until(lambda: len(c.decode.active) == count)
    return list(c.decode.starts)[-count:]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_failure_fails_the_request_and_cancels_the_others(held: Cluster, stream: bool) -> None:
    c = held
    waiting = asyncio.create_task(c.chat(n=3, stream=stream))
    rids = await started(c, 3)
    c.decode.tokens(rids[0], 40)
    await until(lambda: c.router.dispatcher._calls[rids[0]].machine.tokens == 1)
    await asyncio.sleep(0)
    c.decode.end(rids[1], "failed", 500, "the transfer broke")
    answer = await waiting
    assert "the transfer broke" in answer.text and "[DONE]" not in answer.text
    assert answer.status_code == (200 if stream else 500)
    await c.idle()
    assert {cancel.rid for cancel in c.decode.cancels} == {rids[0], rids[2]}


async def test_an_answer_that_is_whole_ends_alone(held: Cluster, text: TextModel) -> None:
    c = held
    waiting = asyncio.create_task(c.client.post("/v1/completions", json=stop_at_end()))
    first, second = await started(c, 2)
    c.decode.tokens(first, *text._tokenizer.encode("one END").ids)
    await until(lambda: c.decode.cancels)
    assert {cancel.rid for cancel in c.decode.cancels} == {first}
    c.decode.tokens(second, *text._tokenizer.encode("two").ids)
    c.decode.end(second, "stop")
    choices = (await waiting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["one ", "two"]
    await c.idle()


def stop_at_end() -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "n": 2, "stop": "END", "max_tokens": 20}


async def test_r1_a_client_that_leaves_cancels_every_leg(held: Cluster) -> None:
    c = held
    c.prefill.hold = True
    leaving = asyncio.create_task(c.client.post("/v1/chat/completions", json=body(n=3)))
    await until(lambda: len(c.decode.active) == len(c.prefill.active) == 3)
    leaving.cancel()
    await c.idle()
    for worker in (c.decode, c.prefill):
        assert {cancel.rid for cancel in worker.cancels} == set(worker.starts) and len(worker.starts) == 3


async def test_either_all_answers_have_room_or_none_is_started(tmp_path: Path, text: TextModel) -> None:
    few = [{"role": "prefill"}, {"role": "decode", "limits": Limits(512, 4096, 3)}]
    async with cluster(tmp_path, text, few) as c:
        answer = await c.chat(n=4)
        assert answer.status_code == 503 and "room for 4" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert not c.decode.starts and not c.prefill.starts
        await c.idle()
        assert (await c.chat(n=3)).status_code == 200


async def test_a_prompt_that_is_too_long_is_named_among_its_list(c: Cluster) -> None:
    for long in ("word " * 2000, [40] * 512):
        fields = {"model": "tiny", "prompt": ["fine", long], "max_tokens": 1}
        answer = await c.client.post("/v1/completions", json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt[1]"
    assert not c.decode.starts


async def test_samples_of_one_prompt_share_a_group_and_a_prefill_worker(tmp_path: Path, text: TextModel) -> None:
    roles = [{"role": "prefill"}, {"role": "prefill"}, {"role": "decode"}, {"role": "decode"}]
    async with cluster(tmp_path, text, roles) as c:
        fields = {"model": "tiny", "prompt": ["a", "b"], "n": 3, "max_tokens": 2}
        answer = await c.client.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        await c.heard(6)
        groups = [{start.group for start in c.worker(name).starts.values()} for name in ("prefill-0", "prefill-1")]
        assert len(groups[0]) == len(groups[1]) == 1 and groups[0] != groups[1]
        decode = [start for name in ("decode-0", "decode-1") for start in c.worker(name).starts.values()]
        assert {len(c.worker(name).starts) for name in ("decode-0", "decode-1")} == {3}
        assert {start.group for start in decode} == groups[0] | groups[1]
        assert (await c.chat()).status_code == 200

        def alone() -> list[Start]:
            return [start for worker in c.workers for start in worker.starts.values() if not start.group]

        await until(lambda: len(alone()) == 2)  # its two legs: a single answer is in no group


async def test_tokens_that_one_step_drew_for_several_answers_reach_each_its_own(held: Cluster) -> None:
    asked = asyncio.create_task(
        held.client.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2})
    )
    await until(lambda: len(held.decode.starts) == 2)
    first, second = held.decode.starts
    router = held.decode.active[first]
    for ids in ((40, 41), (42, 43)):
        assert held.decode.control.send(router, Drawn((first, "nobody's", second), (ids[0], 7, ids[1])))
    for rid in (first, second):
        held.decode.counts[rid] = 2
        held.decode.end(rid, "length")
    answer = (await asked).json()
    shown = held.router.front.text.vocabulary.shown
    assert [choice["text"] for choice in answer["choices"]] == [
        shown(40)[0] + shown(42)[0],
        shown(41)[0] + shown(43)[0],
    ]
    assert held.router.dispatcher.counters()["late_messages"] >= 2  # about a request that there is not
