"""From the bytes of a body to a checked request; every refusal names the field and the limit."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from quiesce.api import schemas, structure
from quiesce.api.backend import Bootstrap
from quiesce.api.errors import ApiError, invalid
from quiesce.api.messages import Message, check_messages, refuse_unserved
from quiesce.api.schemas import ChatBody, CompletionBody, StreamOptions
from quiesce.api.tools import Tools, tools_of

Prompt = str | list[int] | list[Message]  # text, token ids, or chat messages
GIVEN = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class Wanted(msgspec.Struct, frozen=True):
    """A checked request, the same for both endpoints."""

    model: str
    prompts: list[Prompt]
    n: int  # answers to each prompt
    max_tokens: int | None  # None: the rest of the context
    given: dict[str, Any]  # fields of Sampling that the request sets itself
    seed: int | None
    min_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    ignore_eos: bool
    logprobs: int | None  # alternatives to show for each token; 0: the token's own
    prompt_logprobs: int | None  # as a list of its own
    echo: bool
    priority: int
    timeout: float | None  # seconds from arrival to the last byte; None: the server's own limit
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk of a stream
    ignored: tuple[str, ...]
    kind: Literal["prompt", "messages"]  # what the field is called
    grammar: str = ""  # what the answer must be; empty: anything
    grammar_field: str = ""  # the field that says so
    tools: Tools | None = None
    cache_salt: str = ""
    bootstraps: tuple[Bootstrap, ...] = ()  # one for each answer, on the ports of single workers
    label: str = ""  # the client's id, where it comes in the body
    origin: Any = None  # the body of /v1/responses and /generate, which the answer goes by


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def parse_chat(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field."""
    return chat_wanted(decode(_chat, raw))


def chat_wanted(body: ChatBody) -> Wanted:
    """Raises ApiError 400 that names the field."""
    limit = _in_range("max_completion_tokens", body.max_completion_tokens)
    if body.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1, got 0")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "is allowed only together with logprobs: true")
    top = _in_range("top_logprobs", body.top_logprobs)
    logprobs = (top or 0) if body.logprobs else None
    prompt = check_messages(body.messages)
    wanted = _wanted(body, [prompt], max_tokens=limit, logprobs=logprobs, echo=False, kind="messages")
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    if tools is None:
        return wanted
    if wanted.grammar:
        raise invalid(wanted.grammar_field, 'cannot be combined with tools, unless tool_choice is "none"')
    if tools.grammar and body.ignore_eos:
        raise invalid("ignore_eos", "cannot be combined with a forced call: its end ends the answer")
    field = "tools" if tools.grammar else ""
    return msgspec.structs.replace(wanted, tools=tools, grammar=tools.grammar, grammar_field=field)


def parse_completion(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field."""
    return completion_wanted(decode(_completion, raw))


def completion_wanted(body: CompletionBody) -> Wanted:
    """Raises ApiError 400 that names the field."""
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise invalid("max_tokens", "must be at least 1 unless echo is true, got 0")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            "best_of", "is not supported yet; it must be absent or equal to n", code="unsupported_parameter"
        )
    if body.logprobs is not None and (why := schemas.out_of_range("logprobs", body.logprobs, schemas.LOGPROBS)):
        raise invalid("logprobs", why)
    prompts = _prompts(body.prompt)
    return _wanted(body, prompts, max_tokens=None, logprobs=body.logprobs, echo=echo, kind="prompt")


def _prompts(prompt: str | list[Any]) -> list[Prompt]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > schemas.MAX_ANSWERS:
            raise invalid("prompt", f"at most {schemas.MAX_ANSWERS} prompts are allowed, got {len(prompt)}")
        return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]
    return [_prompt(prompt, "prompt")]


def _prompt(prompt: Any, where: str) -> Prompt:
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(id, int) for id in prompt)):
        raise invalid(where, "must be a string or a list of token ids (integers)")
    if not prompt:
        raise invalid(where, "must not be empty")
    return prompt


def _wanted(
    body: ChatBody | CompletionBody,
    prompts: list[Prompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
    kind: Literal["prompt", "messages"],
) -> Wanted:
    refuse_unserved(body, schemas.ASKS_NOTHING, "")
    n = _in_range("n", body.n) or 1
    if n * len(prompts) > schemas.MAX_ANSWERS:
        what = f"{len(prompts)} prompts times n = {n} is more than the {schemas.MAX_ANSWERS} answers of one request"
        raise invalid("n", what)
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is allowed only together with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "is not allowed together with stream: true; echo with logprobs is")
    given = {name: float(value) for name in GIVEN if (value := _in_range(name, getattr(body, name))) is not None}
    if (top_k := _in_range("top_k", body.top_k)) is not None:
        given["top_k"] = max(top_k, 0)
    ignored = [name for name in schemas.IGNORED if getattr(body, name, None) is not None]
    if options.include_obfuscation:
        ignored.append("stream_options.include_obfuscation")
    limit = _in_range("max_tokens", body.max_tokens)
    grammar = structure.grammar_of(body)
    if grammar and body.ignore_eos:
        raise invalid("ignore_eos", "cannot be combined with a grammar: its end ends the answer")
    return Wanted(
        model=body.model,
        prompts=prompts,
        n=n,
        max_tokens=limit if max_tokens is None else max_tokens,
        given=given,
        seed=_in_range("seed", body.seed),
        min_tokens=_in_range("min_tokens", body.min_tokens) or 0,
        stops=_stops(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or []),
        logit_bias=_biases(body.logit_bias or {}),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=_in_range("prompt_logprobs", body.prompt_logprobs),
        echo=echo,
        priority=_in_range("priority", body.priority) or 0,
        timeout=_in_range("timeout", body.timeout),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        ignored=tuple(ignored),
        kind=kind,
        grammar=grammar,
        grammar_field=structure.field_of(body) if grammar else "",
        cache_salt=_salt(body.cache_salt or ""),
    )


Number = TypeVar("Number", int, float)


def _in_range(name: str, value: Number | None) -> Number | None:
    if value is not None and (why := schemas.out_of_range(name, value)) is not None:
        raise invalid(name, why)
    return value


def _salt(salt: str) -> str:
    if len(salt) > schemas.MAX_SALT:
        raise invalid("cache_salt", f"may have at most {schemas.MAX_SALT} characters, got {len(salt)}")
    return salt


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > schemas.MAX_STOPS:
        raise invalid("stop", f"at most {schemas.MAX_STOPS} strings are allowed, got {len(stops)}")
    longest = schemas.MAX_STOP_CHARACTERS
    for one in stops:
        if not 1 <= len(one) <= longest:
            raise invalid("stop", f"each string must have 1 to {longest} characters, got {len(one)}")
    return tuple(stops)


def _stop_token_ids(ids: list[int]) -> tuple[int, ...]:
    if len(ids) > schemas.MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"at most {schemas.MAX_STOP_TOKENS} are allowed, got {len(ids)}")
    return tuple(ids)


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(biases) > schemas.MAX_BIASES:
        raise invalid("logit_bias", f"at most {schemas.MAX_BIASES} token ids are allowed, got {len(biases)}")
    found: dict[int, float] = {}
    for key, value in biases.items():
        if re.fullmatch(r"[0-9]{1,10}", key) is None:
            raise invalid("logit_bias", f"keys must be token ids written in digits, got {key[:50]!r}")
        if (why := schemas.out_of_range("logit_bias", value, schemas.BIAS)) is not None:
            raise invalid("logit_bias", f"the bias of token {key} {why}")
        if int(key) in found:
            raise invalid("logit_bias", f"token {int(key)} is named twice")
        found[int(key)] = float(value)
    return tuple(sorted(found.items()))


Body = TypeVar("Body", bound=msgspec.Struct)


def decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    """Raises ApiError 400 that names the field. A whole number may be written as 5.0, as JSON has it."""
    if raw.count(b",") > schemas.MAX_VALUES or raw.count(b"[") + raw.count(b"{") > schemas.MAX_NESTED:
        limits = f"{schemas.MAX_VALUES} commas and {schemas.MAX_NESTED} brackets"
        raise ApiError(400, f"the body has too many parts; it may have {limits}", code="too_many_parts")
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            again: Body = msgspec.convert(_whole_numbers(msgspec.json.decode(raw)), decoder.type)
            return again
    except msgspec.ValidationError as error:
        text = str(error)
        path = re.search(r"`\$\.?([^`]*)`", text)
        named = re.search(r"field `([^`]+)`", text)
        param = ".".join(part for part in (path and path[1], named and named[1]) if part) or None
        code = "unknown_parameter" if "unknown field" in text else None
        raise ApiError(400, f"{param}: {text}" if param else text, param=param, code=code) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None


def _whole_numbers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole_numbers(item) for item in value]
        case dict():
            return {key: _whole_numbers(item) for key, item in value.items()}
    return value
