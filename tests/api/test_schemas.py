"""What a body may say, and what a refusal names."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.api.errors import ApiError
from quiesce.api.parse import parse_chat, parse_completion
from quiesce.api.schemas import ASKS_NOTHING, IGNORED, RANGES, ChatBody, CompletionBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> Any:
    return parse_chat(msgspec.json.encode(CHAT | fields))


def completion(**fields: Any) -> Any:
    return parse_completion(msgspec.json.encode(PROMPT | fields))


def refused(raw: bytes, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(raw)
    assert caught.value.status == 400
    error = msgspec.json.decode(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return caught.value


def test_defaults() -> None:
    wanted = chat()
    assert wanted.given == {} and wanted.seed is None and wanted.n == 1  # the model folder's values, then
    assert wanted.max_tokens is None and wanted.stops == () and not wanted.stream and not wanted.ignored
    assert wanted.logprobs is None and wanted.prompt_logprobs is None and not wanted.echo


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
        ("stop_token_ids", [1] * 65),
        ("messages", []),
        ("messages", "hi"),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("n", 17),
        ("n", 0),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("top_logprobs", -1),
        ("prompt_logprobs", 21),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "0"),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("min_tokens", -1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [1]),
        ("response_format", {"type": "xml"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("best_off", 1),
        ("temprature", 1),
    ],
)
def test_a_bad_value_is_refused_and_the_field_named(field: str, value: Any) -> None:
    error = refused(msgspec.json.encode(CHAT | {field: value}))
    assert error.param is not None and re.split(r"[.\[]", error.param)[0] == field
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


@pytest.mark.parametrize("field", sorted(RANGES))
def test_both_ends_of_every_range_are_accepted_and_what_lies_beyond_is_not(field: str) -> None:
    parse, base = (parse_chat, CHAT) if field in ChatBody.__struct_fields__ else (parse_completion, PROMPT)
    low, high = RANGES[field]
    with_it: dict[str, Any] = {"logprobs": True} if field == "top_logprobs" else {}
    for value in (low, high) if field not in ("top_p", "max_tokens") else (high,):
        same = {"n": value} if field == "best_of" else {}
        parse(msgspec.json.encode(base | with_it | same | {field: value}))
    for value in (low - 1, high + 1):
        assert field in refused(msgspec.json.encode(base | with_it | {field: value}), parse).message


def test_every_number_of_a_body_has_a_range() -> None:
    numbers = {
        name
        for body in (ChatBody, CompletionBody)
        for name, kind in body.__annotations__.items()
        if str(kind) in ("int | None", "float | None")
    }
    assert numbers - set(RANGES) == {"logprobs"}


def test_whole_numbers_may_have_a_decimal_point() -> None:
    raw = b'{"model": "m", "prompt": [1.0, 2], "max_tokens": 5.0, "temperature": 1, "seed": 1e3, "top_p": 0.5}'
    wanted = parse_completion(raw)
    assert (wanted.prompts, wanted.max_tokens, wanted.seed) == ([[1, 2]], 5, 1000)
    assert wanted.given == {"temperature": 1.0, "top_p": 0.5}
    assert parse_completion(b'{"model": "m", "prompt": [1.0, 2]}').prompts == [[1, 2]]
    for bad in (b"1e300", b"5.5"):
        assert (
            refused(b'{"model": "m", "prompt": "x", "max_tokens": ' + bad + b"}", parse_completion).param
            == "max_tokens"
        )


def test_the_logprobs_of_completions_are_a_number_up_to_20() -> None:
    assert completion(logprobs=0).logprobs == 0 and completion(logprobs=20).logprobs == 20
    for bad in (21, -1, True):
        error = refused(msgspec.json.encode(PROMPT | {"logprobs": bad}), parse_completion)
        assert error.param == "logprobs"


def test_the_logprobs_of_chats_are_a_switch_and_a_number() -> None:
    assert chat(logprobs=True).logprobs == 0 and chat(logprobs=True, top_logprobs=5).logprobs == 5
    assert chat(logprobs=False).logprobs is None
    assert refused(msgspec.json.encode(CHAT | {"logprobs": False, "top_logprobs": 0})).param == "top_logprobs"


def test_max_tokens_may_be_0_where_the_prompt_is_echoed_and_nowhere_else() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert refused(msgspec.json.encode(PROMPT | {"max_tokens": 0}), parse_completion).param == "max_tokens"


def test_best_of_is_n_or_absent() -> None:
    assert completion(n=3, best_of=3).n == 3
    assert refused(msgspec.json.encode(PROMPT | {"n": 2, "best_of": 3}), parse_completion).param == "best_of"


def test_prompts_times_samples_are_bounded() -> None:
    assert len(completion(prompt=["x"] * 8, n=8).prompts) == 8
    assert refused(msgspec.json.encode(PROMPT | {"prompt": ["x"] * 9, "n": 8}), parse_completion).param == "n"
    assert refused(msgspec.json.encode(PROMPT | {"prompt": ["x"] * 65}), parse_completion).param == "prompt"


def test_prompt_logprobs_are_not_for_streams() -> None:
    assert refused(msgspec.json.encode(CHAT | {"prompt_logprobs": 1, "stream": True})).param == "prompt_logprobs"


def test_a_stream_option_without_effect_is_named() -> None:
    wanted = chat(stream=True, stream_options={"include_obfuscation": True})
    assert wanted.ignored == ("stream_options.include_obfuscation",)


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
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}',
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
    assert chat(messages=messages).prompts == [
        [{"role": "system", "content": "a\x00b", "name": "x"}, {"role": "assistant", "content": "y"}]
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3], "c"], [[1], [2, 3], "c"]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


BAD_PROMPTS = ["", [], [[]], [""], ["a", ""], [[1], []], ["a", 1], [1, "a"], [1, [2]], [True], [1.5], [None], 5]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_prompts_that_are_refused(prompt: Any) -> None:
    error = refused(msgspec.json.encode(PROMPT | {"prompt": prompt}), parse_completion)
    assert error.param is not None and error.param.startswith("prompt")


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
