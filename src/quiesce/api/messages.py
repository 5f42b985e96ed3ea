"""Chat messages, checked and in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from quiesce.api import schemas
from quiesce.api.errors import invalid
from quiesce.api.schemas import ChatMessage, ToolCall
from quiesce.api.tools import MAX_CALLED

Message = dict[str, Any]


def check_messages(messages: list[ChatMessage]) -> list[Message]:
    """Raises ApiError 400 that names the message."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    if len(messages) > schemas.MAX_MESSAGES:
        raise invalid("messages", f"at most {schemas.MAX_MESSAGES} are allowed, got {len(messages)}")
    called = sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    if called > MAX_CALLED:
        raise invalid("messages", f"the arguments of calls may have {MAX_CALLED} characters, have {called}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, where: str) -> Message:
    if message.role == "function":
        raise invalid(f"{where}.role", "'function' messages are not supported; 'tool' messages are")
    refuse_unserved(message, schemas.ASKS_NOTHING_IN_MESSAGE, f"{where}.")
    made: Message = {"role": "system" if message.role == "developer" else message.role}
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls", "are the assistant's alone")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise invalid(f"{where}.tool_call_id", "must be there in 'tool' messages, and in no others")
    if message.content is None and not calls:
        raise invalid(f"{where}.content", "must be a string or a list of text parts")
    made["content"] = _text(message, where)
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made | ({"name": message.name} if message.name else {})


def _text(message: ChatMessage, where: str) -> str:
    content = message.content
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise invalid(
                f"{where}.content", f"parts of type {part.type[:50]!r} are not supported, only 'text' with a text"
            )
    return "".join(part.text or "" for part in content)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, so they are given them decoded."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments", "must be the text of a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def refuse_unserved(body: Any, nothing: dict[str, tuple[Any, ...]], where: str) -> None:
    """Raises ApiError 400 for a known field that asks for what is not served."""
    for name, values in nothing.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            fine = " or ".join(["absent", *(json.dumps(v) for v in values)])
            raise invalid(f"{where}{name}", f"is not supported yet; it must be {fine}", code="unsupported_parameter")


def size_of(messages: list[Message]) -> int:
    """Bytes of text in them: no fewer than a template makes of them."""
    return sum(len(message["content"].encode()) for message in messages)
