"""Answers that are held to a grammar, over the whole product: what comes out parses, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.conftest import QUICK, SIZES
from e2e.product import Product
from quiesce.api.structure import of_schema
from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}  # a schema's pattern may match anywhere
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "kind": {"enum": ["a", "é"]}},
                "required": ["x", "kind"],
                "additionalProperties": False,
            },
        },
        "required": ["tags", "place"],
        "additionalProperties": False,
    },
    "choice of shapes": {
        "anyOf": [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
            {"$ref": "#/$defs/word"},
        ],
        "$defs": {"word": WORD},
    },
}


@pytest.fixture(scope="module")
def client(serve: Product) -> Iterator[openai.OpenAI]:
    with serve.client() as client:
        yield client


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """As much of JSON Schema as these schemas use."""
    root = root or schema
    match schema:
        case {"$ref": where}:
            return fits(value, root["$defs"][where.rpartition("/")[2]], root)
        case {"anyOf": several}:
            return any(fits(value, one, root) for one in several)
        case {"enum": values}:
            return value in values
        case {"type": "object", "properties": properties}:
            return isinstance(value, dict) and value.keys() == properties.keys() and all(
                fits(value[name], one, root) for name, one in properties.items()
            )  # fmt: skip
        case {"type": "array", "items": items}:
            low, high = schema.get("minItems", 0), schema["maxItems"]
            return isinstance(value, list) and low <= len(value) <= high and all(fits(v, items, root) for v in value)
        case {"type": "string", "pattern": pattern}:
            return isinstance(value, str) and re.search(pattern, value) is not None
        case {"type": "integer"}:
            low, high = schema["minimum"], schema["maximum"]
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
    raise AssertionError(schema)


def asked(serve: Product, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a person, as JSON"}]
    return {"model": serve.name, "messages": messages, "max_tokens": 200, "temperature": 0, **fields}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_scenario_f58_every_answer_is_of_its_schema_at_any_temperature_streamed_or_not(
    serve: Product, client: openai.OpenAI, name: str
) -> None:
    schema = SCHEMAS[name]
    body = asked(serve, response_format=schema_format(schema))
    sampled = client.chat.completions.create(**body | {"temperature": 1, "seed": 3, "n": 4})
    assert len(sampled.choices) == 4
    for choice in sampled.choices:
        assert choice.finish_reason == "stop"
        assert fits(json.loads(choice.message.content or ""), schema), choice.message.content
    greedy = client.chat.completions.create(**body).choices[0]
    assert greedy.finish_reason == "stop" and fits(json.loads(greedy.message.content or ""), schema)
    chunks = client.chat.completions.create(**body, stream=True, logprobs=True)
    streamed = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in streamed) == greedy.message.content
    tokens = [token for choice in streamed if choice.logprobs for token in choice.logprobs.content or ()]
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode().startswith(greedy.message.content or "?")


def test_scenario_f58_the_answer_is_the_one_of_a_single_process(serve: Product, tiny: Path) -> None:
    """So the token that was handed over is read exactly once, and prefill and decode hold to one grammar."""
    engine = Engine(tiny, dtype="float32", pool_pages=256, threads=1)
    prompt = [40, 41, 42, 43]
    for name, schema in SCHEMAS.items():
        for temperature, seed in ((0.0, 0), (1.0, 7)):
            wish = Sampling(max_tokens=150, temperature=temperature, seed=seed, grammar=of_schema(schema, name))
            (alone,) = LocalEngine(engine).complete([prompt], [wish])
            body = {"model": serve.name, "prompt": prompt, "max_tokens": 150, "temperature": temperature}
            body |= {"seed": seed, "structured_outputs": {"json": schema}}
            answer = serve.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == len(alone.tokens)
            text = serve.http.post("/detokenize", json={"tokens": alone.tokens[:-1]}).json()["prompt"]
            assert answer.json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[ab]{3}-\d{2}"}, r"[ab]{3}-\d{2}"),
        ({"guided_choice": ["yes", "no", "per\"haps\n"]}, 'yes|no|per"haps\n'),
        ({"guided_regex": "x+y"}, "x+y"),
        ({"ebnf": 'root ::= "<" word ">"\nword ::= [a-c]{2,4}'}, "<[a-c]{2,4}>"),
        ({"structured_outputs": {"grammar": 'start: "q" /[0-9]{2}/'}}, r"q\d\d"),
        ({"structured_outputs": {"regex": "[é漢]{2}"}}, "[é漢]{2}"),
    ],
)  # fmt: skip
def test_every_spelling_of_the_wish_is_served(serve: Product, fields: dict[str, Any], pattern: str) -> None:
    answer = serve.http.post("/v1/chat/completions", json=asked(serve, temperature=1, max_tokens=60, **fields))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"]), choice


def test_any_object_stop_strings_and_min_tokens(serve: Product) -> None:
    text = serve.http.post("/v1/chat/completions", json=asked(serve, response_format={"type": "json_object"})).json()
    assert text["choices"][0]["message"]["content"].startswith("{")
    cut = asked(serve, response_format=schema_format(SCHEMAS["flat"]), stop=['"age"'])
    (choice,) = serve.http.post("/v1/chat/completions", json=cut).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].endswith(", ")
    short = asked(serve, guided_choice=["ab"], min_tokens=50, max_tokens=60)
    (choice,) = serve.http.post("/v1/chat/completions", json=short).json()["choices"]
    assert choice["message"]["content"] == "ab", "the grammar wins over min_tokens"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": schema_format({"not": {"type": "string"}})}, 'Unimplemented keys: ["not"]'),
        ({"response_format": schema_format({"type": "string", "format": "wibble"})}, "Unknown format: wibble"),
        ({"response_format": schema_format({"$ref": "http://169.254.169.254/x"})}, "not present in a registry"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a", "guided_choice": ["b"]}, "cannot be combined"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"ebnf": "root ::= ("}, "is not a grammar"),
        ({"guided_json": "{"}, "is not JSON"),
        ({"regex": "a" * 300_000}, "at most 262144"),
        ({"regex": "a{1000000}"}, "too complex"),
        ({"ebnf": "start: start"}, "too complex"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_it_and_reaches_no_worker(
    serve: Product, fields: dict[str, Any], says: str
) -> None:
    before = {name: state["legs_started"] for name, state in serve.ledger().items()}
    answer = serve.http.post("/v1/chat/completions", json=asked(serve, **fields))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"]
    assert {name: state["legs_started"] for name, state in serve.ledger().items()} == before


@pytest.mark.parametrize("stream", [False, True])
def test_scenario_d44_grammars_that_meet_a_limit_in_the_middle_are_their_clients_fault(
    serve: Product, stream: bool
) -> None:
    for number in range(8):
        wish = {"guided_grammar": "start: /a/ start", "prompt": [20 + number], "max_tokens": 30, "stream": stream}
        answer = serve.http.post("/v1/completions", json={"model": serve.name} | wish)
        assert "too complex" in answer.text and "[DONE]" not in answer.text, answer.text
        assert answer.status_code == 400 or stream
    assert serve.metrics()["quiesce:router_breakers_opened_total"] == 0
    assert serve.ask([30, 31], 4)
    serve.check_idle(serve.boot)


def test_many_at_once_and_idle_afterwards(serve: Product) -> None:
    def one(number: int) -> Any:
        schema = SCHEMAS["flat"] if number % 3 else SCHEMAS["nested"]
        body = asked(serve, response_format=schema_format(schema), temperature=1, seed=number)
        return schema, serve.http.post("/v1/chat/completions", json=body).json()

    with ThreadPoolExecutor(8) as pool:
        for schema, answer in pool.map(one, range(16)):
            assert fits(json.loads(answer["choices"][0]["message"]["content"]), schema), answer
    serve.check_idle(serve.boot)


PLACE = {"type": "object", "properties": {"place": {"$ref": "#/$defs/word"}}, "required": ["place"],
         "additionalProperties": False, "$defs": {"word": WORD}}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock"}},
]


@pytest.mark.parametrize("temperature", [0, 1])
def test_scenario_f58_a_forced_call_is_a_call_of_an_offered_tool(
    serve: Product, client: openai.OpenAI, temperature: float
) -> None:
    body = asked(serve, tools=TOOLS, tool_choice="required", temperature=temperature, seed=5)
    body |= {"max_tokens": 600, "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**body).choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and len(calls) == 1 and choice.message.content is None
    for call in calls:
        assert call.type == "function" and call.function.name in ("weather", "clock")
        arguments = json.loads(call.function.arguments)
        assert fits(arguments["place"], WORD) if call.function.name == "weather" else arguments == {}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [d.function.name for d in deltas if d.function and d.function.name] == [calls[0].function.name]
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == calls[0].function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_named_call_streams_its_arguments(serve: Product, client: openai.OpenAI) -> None:
    body = asked(serve, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    (choice,) = client.chat.completions.create(**body).choices
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "weather" and fits(json.loads(call.function.arguments)["place"], WORD)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments
    again: Any = [*body["messages"], choice.message.to_dict(),
                  {"role": "tool", "tool_call_id": call.id, "content": "rain"}]  # fmt: skip
    answer = client.chat.completions.create(**body | {"messages": again, "tool_choice": "auto", "max_tokens": 5})
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_scenario_f85_wishes_that_bind_one_token_do_not_fail_the_prefill_leg(serve: Product) -> None:
    chat, completion = "/v1/chat/completions", "/v1/completions"
    forced = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    for path, fields in [
        (chat, {"min_tokens": 100, "max_tokens": 101}),
        (chat, forced | {"n": 2}),
        (chat, {"stop": ["e"], "n": 2, "max_tokens": 30}),
        (chat, {"response_format": schema_format(SCHEMAS["flat"]), "logprobs": True, "top_logprobs": 2}),
        (chat, {"max_tokens": 50, "max_completion_tokens": 5, "min_tokens": 5, "ignore_eos": True}),
        (completion, {"n": 2, "best_of": 2, "max_tokens": 3}),
    ]:
        body = asked(serve, **fields)
        if path == completion:
            body["prompt"] = body.pop("messages")[0]["content"]
        answer = serve.http.post(path, json=body)
        assert answer.status_code == 200, (fields, answer.text)
        assert len(answer.json()["choices"]) == fields.get("n", 1)
        if "max_completion_tokens" in fields:
            assert answer.json()["usage"]["completion_tokens"] == 5
        streamed = serve.http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n"), streamed.text[-300:]
    serve.check_idle(serve.boot)


def test_scenario_b26_a_bad_tool_schema_pins_no_page(serve: Product) -> None:
    before = {name: state["legs_started"] for name, state in serve.ledger().items()}
    bad: Any = [{"type": "function", "function": {"name": "x", "parameters": {"type": "wibble"}}}]
    for _ in range(20):
        body = asked(serve, tools=bad, tool_choice="required")
        answer = serve.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "wibble" in answer.json()["error"]["message"]
    assert {name: state["legs_started"] for name, state in serve.ledger().items()} == before


def test_scenario_r103_an_answer_goes_on_at_another_worker_where_it_was_in_its_grammar(
    tiny: Path, folder: Path
) -> None:
    slow = "([a-f]{2}-){250}[0-9]{4}"  # it is not over before the worker is killed
    with Product(tiny, folder, *SIZES, *QUICK, "--decode=2", "--deterministic") as two:
        two.wait()
        body = {"model": two.name, "prompt": [40, 41, 42], "max_tokens": 800, "temperature": 0, "regex": slow}
        body |= {"stream": True}
        alone = two.http.post("/v1/completions", json=body | {"stream": False}).json()["choices"][0]["text"]
        assert re.fullmatch(slow, alone)
        said, killed = "", False
        with two.http.stream("POST", "/v1/completions", json=body, timeout=60) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                said += event["choices"][0]["text"]
                if len(said) > 20 and not killed:
                    killed = True
                    states = two.ledger().items()
                    (busy,) = [state["pid"] for _, state in states if state["role"] == "decode" and state["legs"]]
                    os.kill(busy, signal.SIGKILL)
        assert said == alone, "no seam in the text"
        assert two.metrics()["quiesce:router_failovers_total"] == 1
