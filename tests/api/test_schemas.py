"""What a body may say, and what a refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.api.errors import ApiError
from quiesce.api.schemas import ASKS_NOTHING, IGNORED, ChatBody, parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> Any:
    return parse_chat(msgspec.json.encode(CHAT | fields))


def refused(raw: bytes, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(raw)
    assert caught.value.status == 400
    error = msgspec.json.decode(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return caught.value


def test_defaults() -> None:
    wanted = chat()
    assert (wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed) == (1.0, 1.0, 0, None)
    assert wanted.max_tokens is None and wanted.stops == () and not wanted.stream and not wanted.ignored


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_completion_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("seed", 2**63),
        ("seed", -(2**70)),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("stop", "x" * 300),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 65),
        ("messages", []),
        ("messages", "hi"),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("n", 2),
        ("n", 0),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", "0"),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("best_off", 1),
        ("temprature", 1),
    ],
)
def test_a_bad_value_is_refused_and_the_field_named(field: str, value: Any) -> None:
    error = refused(msgspec.json.encode(CHAT | {field: value}))
    assert error.param is not None and error.param.split(".")[0] == field
    assert field in error.message
    assert len(error.message) < 400


def test_limits_are_named() -> None:
    assert "between 0 and 2, got 9" in refused(msgspec.json.encode(CHAT | {"temperature": 9})).message
    assert "at most 16 strings" in refused(msgspec.json.encode(CHAT | {"stop": ["x"] * 20})).message


@pytest.mark.parametrize("field", sorted(ASKS_NOTHING))
def test_unserved_fields_that_ask_for_nothing_are_fine(field: str) -> None:
    parse, base = (parse_chat, CHAT) if field in ChatBody.__struct_fields__ else (parse_completion, PROMPT)
    for value in (None, *ASKS_NOTHING[field]):
        parse(msgspec.json.encode(base | {field: value}))


PROMPT: dict[str, Any] = {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize("field", IGNORED)
def test_harmless_fields_are_accepted_and_reported(field: str) -> None:
    assert chat(**{field: "x"}).ignored == (field,)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": ' + b"[" * 200_000,
        b'{"model": "m"}',
        b'{"messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "king", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user"}]}',
        b'{"model": "m", "messages": [{"role": "tool", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]} trailing',
    ],
)
def test_a_bad_body_is_a_400(raw: bytes) -> None:
    refused(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_400_or_fine(raw: bytes) -> None:
    refused(raw)
    refused(raw, parse_completion)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ChatBody.__struct_fields__), JSON)
def test_any_value_in_any_field_is_fine_or_a_400(field: str, value: Any) -> None:
    try:
        raw = msgspec.json.encode(CHAT | {field: value})
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError):
        return
    try:
        parse_chat(raw)
    except ApiError as error:
        assert error.status == 400
        msgspec.json.decode(error.body())


def test_text_parts_are_joined_and_null_bytes_kept() -> None:
    parts = [{"type": "text", "text": "a\x00"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts, "name": "x"}, {"role": "assistant", "content": "y"}]
    assert chat(messages=messages).prompt == [
        {"role": "system", "content": "a\x00b", "name": "x"},
        {"role": "assistant", "content": "y"},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert parse_completion(msgspec.json.encode(PROMPT | {"prompt": prompt})).prompt == expected


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], [None], 5])
def test_prompts_that_are_refused(prompt: Any) -> None:
    error = refused(msgspec.json.encode(PROMPT | {"prompt": prompt}), parse_completion)
    assert error.param == "prompt"


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
