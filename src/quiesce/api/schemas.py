"""Request bodies as they are on the wire: fields, limits, what is ignored with a warning and what is refused.

The document at /openapi.json is written from these structs and tables, so that it cannot say anything else.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quiesce.api.structure import ResponseFormat, StructuredOutputs
from quiesce.api.tools import Choice, Tool, ToolChoice

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
MAX_SALT = 128  # characters
MAX_ANSWERS = 64  # prompts times samples in one request
MAX_MESSAGES = 1 << 14
MAX_VALUES = 1 << 20  # commas of a body: what JSON is made of costs a hundred times its bytes
MAX_NESTED = 1 << 18  # brackets of a body
MAX_TEXT = 1 << 20  # characters that /tokenize takes
MAX_TOKENS = 1 << 18  # ids that /detokenize takes
INT64 = (-(2**63), 2**63 - 1)
INT32_MAX = 2**31 - 1

# Lowest and highest value of each field, both allowed.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, INT32_MAX),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": INT64,
    "n": (1, 16),
    "best_of": (1, 16),
    "max_tokens": (0, INT32_MAX),
    "max_completion_tokens": (1, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-1000, 1000),
    "timeout": (1, 86_400),
}
ABOVE = ("top_p",)  # here the lowest value itself is not allowed
LOGPROBS = (0, 20)  # of completions, where it is a number
BIAS = (-100, 100)

# Hints that change no answer of ours: accepted, and named in a Warning header.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "reasoning_effort",
    "verbosity",
)

# Known fields that are not served yet: these values ask for nothing and are fine, others are refused.
ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
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
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, each chunk has its answer's so far
    include_obfuscation: bool | None = None


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    timeout: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None  # vLLM's: prompts with different salts share no cache

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class Part(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None

    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = "{}"  # JSON text


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # as streams have it; clients send back what they were given


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None

    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(Common, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    parallel_tool_calls: bool | None = None  # false: one call where a call is forced
    prompt_cache_retention: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    tools: list[Tool] | None = None
    tool_choice: Choice | ToolChoice | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(Common, kw_only=True):
    prompt: str | list[int | str | list[int]]  # one prompt, or several
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    suffix: Any = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def out_of_range(name: str, value: float, limits: tuple[float, float] | None = None) -> str | None:
    """What is wrong with the value of a field, naming its limits, or None. NaN is out of every range."""
    low, high = limits or RANGES[name]
    if name in ABOVE:
        return None if low < value <= high else f"must be above {low} and at most {high}, got {value}"[:200]
    return None if low <= value <= high else f"must be between {low} and {high}, got {value}"[:200]
