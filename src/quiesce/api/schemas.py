"""Request bodies: what is accepted, what is ignored with a warning, what is refused and why."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from quiesce.api.errors import ApiError, invalid

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
INT64 = (-(2**63), 2**63 - 1)
INT32_MAX = 2**31 - 1

# Hints that change no answer of ours: accepted, and named in a Warning header.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "reasoning_effort",
    "verbosity",
)

# Known fields that are not served yet: these values ask for nothing and are fine, others are refused.
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
ASKS_NOTHING_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "function_call": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    n: Any = None
    logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    min_p: Any = None
    min_tokens: Any = None
    response_format: Any = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None

    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class ChatBody(Common, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    parallel_tool_calls: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[Any]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class Wanted(msgspec.Struct, frozen=True):
    """A checked request, the same for both endpoints."""

    model: str
    prompt: str | list[int] | list[dict[str, str]]  # text, token ids, or chat messages
    max_tokens: int | None  # None: the rest of the context
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def parse_chat(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field."""
    body = _decode(_chat, raw)
    if not body.messages:
        raise invalid("messages", "must hold at least one message")
    prompt = [_message(message, i) for i, message in enumerate(body.messages)]
    limit = _in_range("max_completion_tokens", body.max_completion_tokens, 1, INT32_MAX)
    return _wanted(body, prompt, limit)


def parse_completion(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field."""
    body = _decode(_completion, raw)
    return _wanted(body, _prompt(body.prompt), None)


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise invalid("prompt", f"{len(prompt)} prompts in one request are not supported, send one each")
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if isinstance(prompt, list) and not all(type(id) is int for id in prompt):
        raise invalid("prompt", "must be a string or a list of token ids (integers)")
    return prompt


def _message(message: ChatMessage, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.role in ("tool", "function"):
        raise invalid(f"{where}.role", f"{message.role!r} messages are not supported, nor are tools")
    _refuse_unserved(message, ASKS_NOTHING_IN_MESSAGE, f"{where}.")
    if message.content is None:
        raise invalid(f"{where}.content", "must be a string or a list of text parts")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise invalid(
                    f"{where}.content", f"parts of type {part.type!r} are not supported, only 'text' with a text"
                )
        content = "".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({"name": message.name} if message.name else {})


def _wanted(body: ChatBody | CompletionBody, prompt: Any, limit: int | None) -> Wanted:
    _refuse_unserved(body, ASKS_NOTHING, "")
    max_tokens = _in_range("max_tokens", body.max_tokens, 1, INT32_MAX)
    temperature = _in_range("temperature", body.temperature, 0, 2)
    top_p = _in_range("top_p", body.top_p, 0, 1)
    if top_p == 0:
        raise invalid("top_p", "must be above 0 and at most 1, got 0")
    top_k = _in_range("top_k", body.top_k, -1, INT32_MAX)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is allowed only together with stream: true")
    options = body.stream_options or StreamOptions()
    return Wanted(
        model=body.model,
        prompt=prompt,
        max_tokens=limit if limit is not None else max_tokens,
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=max(top_k or 0, 0),
        seed=_in_range("seed", body.seed, *INT64),
        stops=_stops(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or []),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        ignored=tuple(name for name in IGNORED if getattr(body, name, None) is not None),
    )


Number = TypeVar("Number", int, float)


def _in_range(name: str, value: Number | None, low: int, high: int) -> Number | None:
    if value is not None and not low <= value <= high:
        raise invalid(name, f"must be between {low} and {high}, got {value}"[:200])
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} strings are allowed, got {len(stops)}")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARACTERS:
            raise invalid("stop", f"each string must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(one)}")
    return tuple(stops)


def _stop_token_ids(ids: list[int]) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_TOKENS} are allowed, got {len(ids)}")
    for id in ids:
        _in_range("stop_token_ids", id, 0, INT32_MAX)
    return tuple(ids)


def _refuse_unserved(body: msgspec.Struct, nothing: dict[str, tuple[Any, ...]], where: str) -> None:
    for name, values in nothing.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            fine = " or ".join(["absent", *(msgspec.json.encode(v).decode() for v in values)])
            raise invalid(f"{where}{name}", f"is not supported yet; it must be {fine}", code="unsupported_parameter")


Body = TypeVar("Body", ChatBody, CompletionBody)


def _decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        path = re.search(r"`\$\.?([^`]*)`", text)
        named = re.search(r"field `([^`]+)`", text)
        param = ".".join(part for part in (path and path[1], named and named[1]) if part) or None
        code = "unknown_parameter" if "unknown field" in text else None
        raise ApiError(400, f"{param}: {text}" if param else text, param=param, code=code) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
