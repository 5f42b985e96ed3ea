"""/v1/responses with the official client: whole, streamed, with tools and schemas, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from quiesce.api.chat import TextModel
from quiesce.api.errors import ApiError
from quiesce.api.responses import parse_response
from quiesce.core.fingerprint import Limits
from quiesce.core.messages import Start
from router.cluster import MODEL, Cluster, cluster

pytestmark = pytest.mark.anyio

LIMITS = Limits(context_length=2048, pool_tokens=4096, max_queued=8)
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {"zone": {}}}}


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    def reply(start: Start) -> tuple[int, ...]:
        prompt = text._tokenizer.decode(list(start.token_ids), skip_special_tokens=False)
        said = f"Wait. {CALL}" if "<tools>" in prompt else "Grüße, 世界"
        return (*text._tokenizer.encode(said).ids, 1)

    workers = [{"role": "prefill", "limits": LIMITS}, {"role": "decode", "reply": reply, "limits": LIMITS}]
    async with cluster(tmp_path, text, workers) as made:
        yield made


@pytest.fixture
async def client(c: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_the_official_client_gets_text_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL, input="hi", instructions="Be brief.", store=False)
    assert whole.output_text == "Grüße, 世界" and whole.status == "completed" and whole.error is None
    assert (
        whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    )
    assert whole.instructions == "Be brief." and whole.id.startswith("resp_")
    async with client.responses.stream(model=MODEL, input="hi", store=False) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Grüße, 世界" and final.usage is not None
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_answer_that_is_cut_is_incomplete(client: openai.AsyncOpenAI) -> None:
    cut = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_calls_of_tools_and_their_results(client: openai.AsyncOpenAI, c: Cluster, text: TextModel) -> None:
    first = await client.responses.create(model=MODEL, input="time?", tools=[CLOCK])
    message, call = first.output
    assert message.type == "message" and call.type == "function_call"
    assert call.name == "clock" and json.loads(call.arguments) == {"zone": "UTC"}
    async with client.responses.stream(model=MODEL, input="time?", tools=[CLOCK]) as stream:
        streamed = await stream.get_final_response()
    assert [item.type for item in streamed.output] == ["message", "function_call"]
    assert json.loads(streamed.output[1].arguments) == {"zone": "UTC"}  # type: ignore[union-attr]
    turns: Any = [{"role": "user", "content": "time?"}, *(item.to_dict() for item in first.output)]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    await client.responses.create(model=MODEL, input=turns)
    prompt = text._tokenizer.decode(list(list(c.decode.starts.values())[-1].token_ids), skip_special_tokens=False)
    assert "Wait. \n<tool_call>\n" in prompt and "<tool_response>\nnoon\n</tool_response>" in prompt


async def test_log_probabilities_and_a_schema_reach_the_workers(client: openai.AsyncOpenAI, c: Cluster) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(model=MODEL, input="hi", text=form, include=include, top_logprobs=2)
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert part.logprobs and all(len(token.top_logprobs) == 2 for token in part.logprobs)  # type: ignore[union-attr]
    assert list(c.decode.starts.values())[-1].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "nobody waits"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Invalid"),
        ({"input": [{"role": "user"}]}, "input[0]", "content"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type", "Invalid"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0]", "output"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "between"),
        ({"truncation": "auto"}, "truncation", "must be absent"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"frobnicate": 1}, "frobnicate", "unknown"),
    ],
)
def test_what_is_absent_is_a_400_that_says_so(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_response(msgspec.json.encode({"model": "m", "input": "hi"} | fields))
    assert caught.value.status == 400 and caught.value.param == param and says in caught.value.message
