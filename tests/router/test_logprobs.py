"""Log-probabilities over HTTP: one for each token, the first included, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.api.chat import TextModel
from quiesce.core.messages import PromptLogprobs, Start, TokenLogprob, Tokens
from router.cluster import Cluster, cluster, logprob_of, until

pytestmark = pytest.mark.anyio

WORDS = "ein Baum 🌳, 漢字"


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    """Answers with the words; the first token is one byte of nothing whole when the prompt is a single id."""
    ids = text._tokenizer.encode(WORDS).ids

    def reply(start: Start) -> list[int]:
        return ids[10:] if len(start.token_ids) == 1 else ids

    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "reply": reply}]) as made:
        yield made


async def post(c: Cluster, path: str, **fields: Any) -> dict[str, Any]:
    answer = await c.client.post(path, json={"model": "tiny", "max_tokens": 40} | fields)
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        return joined(answer.text)
    return answer.json()["choices"][0]


def joined(events: str) -> dict[str, Any]:
    """The chunks of a stream, put together as a whole answer."""
    frames = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for frame in frames for choice in frame["choices"]]
    parts: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            if values is not None:
                parts.setdefault(name, []).extend(values)
    said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    found = {"finish_reason": choices[-1]["finish_reason"], "logprobs": parts or None}
    return found | ({"text": said} if "text" in choices[0] else {"message": {"content": said}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 5])
async def test_scenario_f101_a_chat_has_one_entry_for_each_token(
    c: Cluster, text: TextModel, stream: bool, top: int
) -> None:
    fields: Any = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": top}
    choice = await post(c, "/v1/chat/completions", stream=stream, **fields)
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == WORDS
    ids = text._tokenizer.encode(WORDS).ids
    assert [entry["logprob"] for entry in entries] == [logprob_of(id, 0).logprob for id in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == WORDS.encode()
    for id, entry in zip(ids, entries, strict=True):
        tops = entry["top_logprobs"]
        assert len(tops) == (0 if top == 0 else max(2, top))  # the fakes' own token is second, so 1 grows to 2
        if top:
            assert {"token", "logprob", "bytes"} == set(tops[0])
            assert (entry["token"], entry["logprob"]) in [(one["token"], one["logprob"]) for one in tops]
            assert tops[0]["token"] == text.vocabulary.shown(id + 1)[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_is_shown_as_its_bytes(c: Cluster, text: TextModel, stream: bool) -> None:
    choice = await post(c, "/v1/completions", prompt=[7], logprobs=0, stream=stream)
    ids = text._tokenizer.encode(WORDS).ids[10:]
    assert choice["text"] == text._tokenizer.decode(ids)
    logprobs = choice["logprobs"]
    assert [len(values) for values in logprobs.values()] == [len(ids)] * 4
    raw = text.vocabulary.token_bytes(ids[0])
    assert logprobs["tokens"][0] == "".join(f"\\x{byte:02x}" for byte in raw)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_offsets_of_completions_find_each_token_in_the_text(
    c: Cluster, text: TextModel, stream: bool
) -> None:
    choice = await post(c, "/v1/completions", prompt="x y", logprobs=2, stream=stream)
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("\\x"):
            assert choice["text"][offset:].startswith(token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == own and len(top) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_and_its_logprobs_before_the_answer(
    c: Cluster, text: TextModel, stream: bool
) -> None:
    prompt = "Wörter für 漢"
    choice = await post(c, "/v1/completions", prompt=prompt, echo=True, logprobs=1, stream=stream)
    assert choice["text"] == prompt + WORDS
    ids = text._tokenizer.encode(prompt).ids
    logprobs = choice["logprobs"]
    everything = [*ids, *text._tokenizer.encode(WORDS).ids]
    assert logprobs["token_logprobs"] == [None, *(logprob_of(id, 0).logprob for id in everything[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"][len(ids)] == len(prompt)
    start = list(c.prefill.starts.values())[-1]
    assert start.sampling.prompt_logprobs == 1


async def test_echo_alone_asks_for_no_logprobs_and_takes_token_ids(c: Cluster, text: TextModel) -> None:
    ids = text._tokenizer.encode("a 漢").ids
    choice = await post(c, "/v1/completions", prompt=ids, echo=True)
    assert choice["text"] == "a 漢" + WORDS and choice["logprobs"] is None
    await c.heard(1)
    assert list(c.prefill.starts.values())[-1].sampling.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_tokens_scores_the_prompt(c: Cluster, text: TextModel, stream: bool) -> None:
    fields: Any = {"model": "tiny", "prompt": "to be scored", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await c.client.post("/v1/completions", json=fields | {"stream": stream})
    choice = joined(answer.text) if stream else answer.json()["choices"][0]
    assert choice["text"] == "to be scored" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(text._tokenizer.encode("to be scored").ids)
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0


async def test_the_prompts_own_logprobs_name_ids_ranks_and_tokens(c: Cluster, text: TextModel) -> None:
    choice = await post(c, "/v1/completions", prompt=[40, 50, 60], prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "51": {"logprob": -0.25 - 50 / 1024, "rank": 1, "decoded_token": text.vocabulary.shown(51)[0]},
            "50": {"logprob": -0.5 - 50 / 1024, "rank": None, "decoded_token": text.vocabulary.shown(50)[0]},
        },
        {
            "61": {"logprob": -0.25 - 60 / 1024, "rank": 1, "decoded_token": text.vocabulary.shown(61)[0]},
            "60": {"logprob": -0.5 - 60 / 1024, "rank": None, "decoded_token": text.vocabulary.shown(60)[0]},
        },
    ]
    assert choice["logprobs"] is None
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 2}
    answer = (await c.client.post("/v1/chat/completions", json=fields)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    plain = (await c.client.post("/v1/chat/completions", json=fields | {"prompt_logprobs": None})).json()
    assert "prompt_logprobs" not in plain


async def test_tokens_behind_a_stop_string_have_no_entries(c: Cluster, text: TextModel) -> None:
    for stream in (False, True):
        choice = await post(c, "/v1/completions", prompt="x y", logprobs=0, stop="Baum", stream=stream)
        assert choice["text"] == "ein " and choice["finish_reason"] == "stop"
        assert "".join(choice["logprobs"]["tokens"]).startswith("ein Baum")
        assert "".join(choice["logprobs"]["tokens"][:-1]).find("Baum") == -1


async def test_a_logarithm_of_nothing_is_a_number_that_json_has(c: Cluster) -> None:
    c.decode.hold = True
    waiting = asyncio.create_task(post(c, "/v1/completions", prompt="x", logprobs=1, max_tokens=1))
    rid = await until(lambda: next(iter(c.decode.active), None))
    logprob = TokenLogprob(float("-inf"), ((41, 0.0), (42, float("-inf"))))
    assert c.decode.control.send(c.decode.active[rid], Tokens(rid, (40,), (logprob,)))
    c.decode.counts[rid] += 1
    c.decode.end(rid, "length")
    assert (await waiting)["logprobs"]["token_logprobs"] == [-9999.0]


async def test_tokens_without_the_logprobs_that_were_asked_for_are_a_failure(c: Cluster) -> None:
    c.decode.hold = True
    waiting = asyncio.create_task(
        c.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "logprobs": 1})
    )
    rid = await until(lambda: next(iter(c.decode.active), None))
    assert c.decode.control.send(c.decode.active[rid], Tokens(rid, (40,)))
    answer = await waiting
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "logprobs_lost"
    await c.idle()


async def test_the_answer_waits_for_the_prompts_logprobs_however_late_they_are(c: Cluster, text: TextModel) -> None:
    c.prefill.hold = True
    fields = {"model": "tiny", "prompt": [40] * 12, "echo": True, "logprobs": 0, "max_tokens": 2}
    waiting = asyncio.create_task(c.client.post("/v1/completions", json=fields))
    rid = await until(lambda: next(iter(c.prefill.active), None))
    call = c.router.dispatcher._calls[rid]
    await until(lambda: call.machine.tokens == 2 and not c.decode.active)
    c.prefill.tell_prompt(c.prefill.starts[rid])
    c.prefill.end(rid, "handed_over")
    answer = (await waiting).json()["choices"][0]
    assert len(answer["logprobs"]["tokens"]) == 14
    await c.idle()
    assert not c.decode.cancels and not c.prefill.cancels


@pytest.mark.parametrize("loss", ["none came", "a piece", "it died"])
async def test_lost_logprobs_of_the_prompt_are_a_failure(c: Cluster, loss: str) -> None:
    c.prefill.hold = True
    fields = {"model": "tiny", "prompt": [40] * 12, "prompt_logprobs": 0, "max_tokens": 2}
    waiting = asyncio.create_task(c.client.post("/v1/completions", json=fields))
    rid = await until(lambda: next(iter(c.prefill.active), None))
    call = c.router.dispatcher._calls[rid]
    await until(lambda: call.machine.tokens == 2)
    if loss == "none came":
        c.prefill.end(rid, "handed_over")
    elif loss == "a piece":
        message = PromptLogprobs(rid, 5, (logprob_of(40, 0),) * 7)
        assert c.prefill.control.send(c.prefill.active[rid], message)
    else:
        c.prefill.kill()
        c.exited(c.prefill)
    answer = await waiting
    assert answer.status_code == (502 if loss == "it died" else 500)


async def test_a_colocated_worker_tells_of_prompt_and_answer(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [{"role": "colocated"}]) as c:
        choice = await post(c, "/v1/completions", prompt=[50, 60], echo=True, logprobs=0, max_tokens=2)
        assert choice["logprobs"]["token_logprobs"] == [None, *(logprob_of(id, 0).logprob for id in (60, 40, 40))]
