"""/v1/responses: OpenAI's newer shape of a chat. Nothing is stored, so what refers to stored things is refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quiesce.api.errors import invalid
from quiesce.api.messages import refuse_unserved
from quiesce.api.parse import Wanted, chat_wanted, decode
from quiesce.api.schemas import CalledFunction, ChatBody, ChatMessage, ToolCall
from quiesce.api.structure import JsonSchema, ResponseFormat
from quiesce.api.tools import Function, Named, Tool, ToolChoice

LOGPROBS = "message.output_text.logprobs"
NOTHING: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "context_management": ([],),
    "include": ([], [LOGPROBS]),
}
WHY = {
    "store": "nothing is stored here; send store: false, or leave it out",
    "previous_response_id": "nothing is stored here; send the earlier turns in `input`",
    "conversation": "nothing is stored here; send the earlier turns in `input`",
    "background": "an answer that nobody waits for is not made, as nothing is stored here",
}
HINTS = ("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "reasoning")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class Item(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a call of a function, or what a function gave back, by `type`."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FlatTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, rename={"body": "schema"}):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    body: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextWish(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: Any = None
    text: TextWish | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None

    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    truncation: Any = None
    max_tool_calls: Any = None
    context_management: Any = None

    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None


_body = msgspec.json.Decoder(ResponsesBody)


def parse_response(raw: bytes) -> Wanted:
    """Raises ApiError 400 that names the field."""
    body = decode(_body, raw)
    for name, why in WHY.items():
        value = getattr(body, name)
        if value is not None and value not in NOTHING[name]:
            raise invalid(name, why, "unsupported_parameter")
    refuse_unserved(body, NOTHING, "")
    logprobs = bool(body.include)
    if body.top_logprobs and not logprobs:
        raise invalid("top_logprobs", f"is allowed only together with include: [{LOGPROBS!r}]")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise invalid("max_output_tokens", f"must be at least 1, got {body.max_output_tokens}")
    wanted = chat_wanted(
        ChatBody(
            model=body.model,
            messages=_messages(body),
            max_completion_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=logprobs or None,
            top_logprobs=body.top_logprobs if logprobs else None,
            stream=body.stream,
            response_format=_format(body.text),
            tools=[_tool(tool) for tool in body.tools or []] or None,
            tool_choice=_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
        )
    )
    hints = tuple(name for name in HINTS if getattr(body, name) is not None)
    if body.text is not None and body.text.verbosity is not None:
        hints += ("text.verbosity",)
    return msgspec.structs.replace(wanted, origin=body, ignored=wanted.ignored + hints)


def _format(text: TextWish | None) -> ResponseFormat | None:
    given = text.format if text is not None else None
    if given is None:
        return None
    schema = JsonSchema(given.name or "answer", given.body) if given.type == "json_schema" else None
    return ResponseFormat(given.type, schema)


def _tool(tool: FlatTool) -> Tool:
    return Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: Any) -> Any:
    return ToolChoice("function", Named(choice.name)) if isinstance(choice, FlatChoice) else choice


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    """The turns as a chat has them: calls in a row belong to one message."""
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage("user", body.input)]
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        match item.type:
            case "message":
                if item.role is None or item.content is None:
                    raise invalid(where, "a message must have a role and a content")
                messages.append(ChatMessage(item.role, _text(item.content)))
            case "function_call":
                if item.call_id is None or item.name is None:
                    raise invalid(where, "a function_call must have a call_id and a name")
                call = ToolCall(item.call_id, CalledFunction(item.name, item.arguments or "{}"))
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage("assistant"))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise invalid(where, "a function_call_output must have a call_id and an output")
                messages.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
    return messages


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
