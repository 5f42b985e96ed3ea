"""Tool calls: what a request may say of tools, and every form of a call, cut anywhere, streamed or not."""

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
from quiesce.api.parse import parse_chat
from quiesce.api.toolcalls import Arguments, Call, Form, Text, form_of, read_whole, reader_for
from quiesce.api.tools import Tools
from quiesce.core.fingerprint import Limits
from quiesce.core.messages import Start
from router.cluster import MODEL, Cluster, cluster
from tiny_model import make_tiny_llama

pytestmark = pytest.mark.anyio

LIMITS = Limits(context_length=2048, pool_tokens=4096, max_queued=8)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMES = frozenset({"weather", "clock"})
AUTO = Tools([WEATHER, CLOCK], NAMES, "auto", False, "")
ROME = ("weather", '{"place": "Rome"}')
NOW = ("clock", "{}")


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "Just text < with <tool> marks", "Just text < with <tool> marks", []),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>', "", [ROME]),
        (
            "hermes",
            'Sure. <tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "weather", "arguments": {"place":"Rome"}}</tool_call>\n',
            "Sure. ",
            [NOW, ROME],
        ),
        ("hermes", '<tool_call>{"name": "clock", "arguments": {}}', "", [NOW]),  # ended without closing it
        ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>', None, []),  # was not offered
        ("hermes", "<tool_call>not json</tool_call> and on", None, []),
        ("hermes", '<tool_call>{"name": "clo', None, []),
        ("llama3_json", '{"name": "weather", "parameters": {"place": "Rome"}}', "", [ROME]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"place": "Rome"}}',
            "",
            [NOW, ROME],
        ),
        ("llama3_json", '{"answer": 42}', None, []),
        ("llama3_json", 'It is {"name": "clock", "parameters": {}}', None, []),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Rome"}}]', "", [ROME]),
        ("mistral", 'Well [TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]weather{"place": "Rome"}', "Well ", [NOW, ROME]),
        ("mistral", "[TOOL_CALLS] nothing", None, []),
        ("mistral", "[TOOL_BOX] is text", None, []),
    ],
)
def test_calls_are_read_whole_and_cut_anywhere(
    form: Form, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = text if content is None else content  # what is no call is text, and nothing of it is lost
    for size in (1, 2, 3, 7, len(text)):
        reader = reader_for(AUTO, form)
        pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
        pieces += reader.finish()
        assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == expected
        begun = [piece for piece in pieces if isinstance(piece, Call)]
        assert [call.name for call in begun] == [name for name, _ in calls]
        assert [call.index for call in begun] == list(range(len(calls)))
        assert len({call.id for call in begun}) == len(calls)
        for index, (_, arguments) in enumerate(calls):
            said = "".join(p.text for p in pieces if isinstance(p, Arguments) and p.index == index)
            assert json.loads(said) == json.loads(arguments)


def test_the_form_is_the_one_that_the_template_teaches() -> None:
    assert form_of("... <tool_call> ...") == "hermes"
    assert form_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert form_of('Respond in the format {"name": function name, "parameters": {}}') == "llama3_json"
    assert form_of("") == "hermes"
    (call,) = read_whole(reader_for(AUTO, "mistral"), '[TOOL_CALLS][{"name":"clock","arguments":{}}]')[1]
    assert len(call[0]) == 9 and call[0].isalnum()


def wanted(**fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, CLOCK]}
    return parse_chat(msgspec.json.encode(body | fields))


def test_what_may_be_said_of_tools() -> None:
    assert wanted(tool_choice="none").tools is None and not wanted(tool_choice="none").grammar
    assert wanted().tools.choice == "auto" and not wanted().grammar
    assert (
        wanted(tool_choice="required").grammar and wanted(tool_choice="required", parallel_tool_calls=False).grammar
    )
    named = wanted(tool_choice={"type": "function", "function": {"name": "clock"}})
    assert named.tools.named and named.tools.choice == "clock" and named.grammar
    assert wanted(tool_choice="none", response_format={"type": "json_object"}).grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wanted(**fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_arguments_of_an_earlier_call_must_be_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "[1"}}
    with pytest.raises(ApiError, match="JSON object"):
        wanted(messages=[{"role": "assistant", "tool_calls": [call]}])


HISTORY: list[Any] = [
    {"role": "user", "content": "time?"},
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "clock", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


async def test_a_template_without_tools_is_told_of_them_in_words(text: TextModel) -> None:
    request = wanted(messages=HISTORY)
    ids = await text.encode(request.prompts[0], 4096, tools=request.tools.shown)
    prompt = text._tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nYou may call one or more functions")
    assert '"name":"weather"' in prompt and "<tool_call>\n{" in prompt
    assert '<|im_start|>assistant\n<tool_call>\n{"name":"clock","arguments":{}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in prompt


async def test_a_template_with_tools_is_given_them(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    path = folder / "tokenizer_config.json"
    template = "{% for t in tools %}{{ t.function.name }},{% endfor %}{% for m in messages %}{{ m.role }}{% if m.tool_calls %}:{{ m.tool_calls[0].function.arguments | length }}{% endif %};{% endfor %}<tool_call>"  # noqa: E501
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    model = TextModel(folder)
    request = wanted(messages=HISTORY)
    ids = await model.encode(request.prompts[0], 4096, tools=request.tools.shown)
    assert model._tokenizer.decode(ids) == "weather,clock,user;assistant:0;tool;<tool_call>"
    assert model.tool_form == "hermes"
    model.close()


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    said = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'

    def reply(start: Start) -> tuple[int, ...]:
        return (*text._tokenizer.encode(said).ids, 1)

    async with cluster(
        tmp_path, text, [{"role": "prefill", "limits": LIMITS}, {"role": "decode", "reply": reply, "limits": LIMITS}]
    ) as made:
        yield made


async def test_the_official_client_hears_of_a_call_whole_and_streamed(c: Cluster) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Rome?"}], "tools": [CLOCK, WEATHER]}
    asked |= {"max_tokens": 200}
    async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=0) as client:
        (whole,) = (await client.chat.completions.create(**asked)).choices
        assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see.\n"
        (call,) = whole.message.tool_calls or ()
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"place": "Rome"}
        async with client.chat.completions.stream(**asked) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.message.content == "Let me see.\n" and final.finish_reason == "tool_calls"
        (call,) = final.message.tool_calls or ()
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"place": "Rome"}
        none = await client.chat.completions.create(**asked | {"tool_choice": "none"})
        assert none.choices[0].finish_reason == "stop" and not none.choices[0].message.tool_calls
        assert "<tool_call>" in (none.choices[0].message.content or "")


async def test_usage_in_every_chunk_where_a_client_wants_it(c: Cluster) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Rome?"}], "tools": [CLOCK, WEATHER]}
    asked |= {"max_tokens": 200, "stream": True}
    asked |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for body in (asked, asked | {"tool_choice": "none"}):
        lines = (await c.client.post("/v1/chat/completions", json=body)).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-2] == counts[-1] > 0
        assert chunks[-2]["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] > 0
