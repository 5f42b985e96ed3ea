"""The official client against the product: what an application does all day."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.conftest import short_folder, warmed
from e2e.product import Product

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(serve: Product) -> Iterator[openai.OpenAI]:
    with serve.client() as client:
        yield client


def test_chat_completion_with_usage_and_finish_reason(serve: Product, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=serve.name, messages=HELLO, max_tokens=7, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 7
    assert answer.model == serve.name and answer.id.startswith("chatcmpl-")


def test_stream_says_the_same_as_the_whole_answer(serve: Product, client: openai.OpenAI) -> None:
    asked = {"model": serve.name, "messages": HELLO, "max_tokens": 400, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    for _ in range(3):  # tokens come as they are made, and many at a time only after the router has stood still
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        if len(chunks) > 10:
            break
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1])
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 10, "three times the whole answer came in a few pieces"


def test_completion_of_text_and_of_token_ids(serve: Product, client: openai.OpenAI) -> None:
    by_text = client.completions.create(model=serve.name, prompt="123", max_tokens=5, temperature=0)
    ids = [4 + ord(digit) - ord("!") for digit in "123"]  # the byte alphabet begins at '!', after four specials
    by_ids = client.completions.create(model=serve.name, prompt=ids, max_tokens=5, temperature=0)
    assert by_text.usage is not None and by_text.usage.prompt_tokens == 3
    assert by_text.choices[0].text == by_ids.choices[0].text


def test_stop_string_ends_the_answer_before_it(serve: Product, client: openai.OpenAI) -> None:
    asked = {"model": serve.name, "prompt": [40, 41, 42], "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked, max_tokens=60).choices[0].text
    stop = whole[20:23]
    cut = client.completions.create(**asked, max_tokens=60, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]
    streamed = client.completions.create(**asked, max_tokens=60, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text
    serve.check_idle(serve.boot)


def test_seed_fixes_a_sampled_answer(serve: Product, client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        answer = client.completions.create(
            model=serve.name, prompt=[50, 51], max_tokens=24, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(5)}) > 1


def test_models_are_listed(serve: Product, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [serve.name]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_e19_equal_request_ids_are_two_requests(serve: Product, client: openai.OpenAI) -> None:
    label = {"X-Request-Id": "same"}
    first = client.completions.with_streaming_response.create(
        model=serve.name, prompt=[60, 61], max_tokens=400, temperature=0, stream=True, extra_headers=label,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    alone = serve.ask([70, 71, 72], tokens=12)
    with first as streaming:
        lines = streaming.iter_lines()
        next(lines)
        second = client.completions.create(
            model=serve.name, prompt=[70, 71, 72], max_tokens=12, temperature=0, extra_headers=label,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert second.choices[0].text == alone
    third = client.completions.create(
        model=serve.name, prompt=[70, 71, 72], max_tokens=12, temperature=0, extra_headers=label,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert third.choices[0].text == alone and third.id != second.id
    serve.check_idle(serve.boot)


# ------------------------------------------------------------ the real model


@pytest.fixture(scope="module")
def real() -> Iterator[Product]:
    options = ("--context-length=1024", "--max-total-tokens=4096")
    with short_folder() as path, Product("smollm2", Path(path), *options) as product:
        yield warmed(product)


def test_real_model_counts_right_past_eighty_tokens(real: Product) -> None:
    question = [{"role": "user", "content": "Count from 1 to 100, separated by commas."}]
    with real.client() as client:
        answer = client.chat.completions.create(model="smollm2", messages=question, temperature=0, max_tokens=110)
    said = answer.choices[0].message.content or ""
    assert answer.usage is not None and answer.usage.completion_tokens > 80
    numbers = [int(word) for word in said.rstrip(", ").split(",") if word.strip().isdigit()]
    start = numbers.index(1)
    assert numbers[start : start + 30] == list(range(1, 31)), said


def test_real_model_answers_and_stops_by_itself(real: Product) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    with real.client() as client:
        answer = client.chat.completions.create(model="smollm2", messages=question, temperature=0, max_tokens=100)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    real.check_idle(real.boot)


def test_real_model_fills_in_a_schema_and_calls_a_tool(real: Product) -> None:
    text = {"type": "string", "maxLength": 12}
    schema = {
        "type": "object",
        "properties": {"name": text, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema | {"properties": {"city": text},
            "required": ["city"]}}}  # fmt: skip
    question = [{"role": "user", "content": "Describe a person. What is the weather in Paris?"}]
    with real.client() as client:
        asked: dict[str, Any] = {"model": "smollm2", "messages": question, "max_tokens": 60}
        for temperature in (0, 1):
            answer = client.chat.completions.create(**asked, temperature=temperature, response_format=form)
            person = json.loads(answer.choices[0].message.content or "")
            assert len(person["name"]) <= 12 and 0 <= person["age"] <= 120 and len(person) == 2
        forced = client.chat.completions.create(
            **asked, temperature=0, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        (call,) = forced.choices[0].message.tool_calls or ()
        assert call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"]
        response = client.responses.create(model="smollm2", input="Say hello.", max_output_tokens=8)
        assert response.output_text and response.status == "incomplete"
    real.check_idle(real.boot)
