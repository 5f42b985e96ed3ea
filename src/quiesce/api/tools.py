"""Tools that an answer may call: what a request says of them, and the grammar that forces a call."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from quiesce.api.errors import invalid
from quiesce.api.structure import of_schema

MAX_TOOLS = 128
MAX_CALLED = 1 << 20  # bytes of them all, and of the arguments of earlier calls: templates write them out
MAX_FORCED = 16  # calls of one answer under tool_choice "required"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SHARED = ("$defs", "definitions")  # of a tool's parameters: references to them start at the root


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema of an object
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Named


Choice = Literal["none", "auto", "required"]


class Tools(msgspec.Struct, frozen=True):
    """The tools of one request. `choice`: auto, required, or the name of the one that must be called."""

    shown: list[dict[str, Any]]  # as chat templates take them
    names: frozenset[str]
    choice: str
    named: bool
    grammar: str  # forces a call; empty under auto


def tools_of(tools: list[Tool] | None, choice: Choice | ToolChoice | None, parallel: bool | None) -> Tools | None:
    """None when no tool may be called: none are given, or the choice is "none". Raises ApiError 400."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "is allowed only together with tools")
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} are allowed, got {len(tools)}")
    functions: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        name = tool.function.name
        if NAME.fullmatch(name) is None:
            raise invalid(f"tools[{i}].function.name", "must be 1 to 64 letters, digits, _, - or .")
        if name in functions:
            raise invalid(f"tools[{i}].function.name", f"{name!r} is named twice")
        functions[name] = tool.function
    if choice == "none":
        return None
    size = len(msgspec.json.encode(tools))
    if size > MAX_CALLED:
        raise invalid("tools", f"may have {MAX_CALLED} bytes, have {size}")
    shown = [msgspec.to_builtins(tool) for tool in tools]
    names = frozenset(functions)
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in functions:
            raise invalid("tool_choice.function.name", f"{name[:100]!r} is none of the tools")
        schema = functions[name].parameters or NO_ARGUMENTS
        return Tools(shown, names, name, True, of_schema(schema, f"tools: the parameters of {name}"))
    if choice == "required":
        most = 1 if parallel is False else MAX_FORCED
        return Tools(shown, names, "required", False, of_schema(_forced(functions, most), "tools"))
    return Tools(shown, names, "auto", False, "")


def _forced(functions: dict[str, Function], most: int) -> dict[str, Any]:
    """JSON Schema of a list of calls."""
    shared: dict[str, dict[str, Any]] = {}
    kinds = []
    for name, function in functions.items():
        parameters = dict(function.parameters or NO_ARGUMENTS)
        for kind in SHARED:
            _share(shared.setdefault(kind, {}), parameters.pop(kind, None), f"tools: {kind} of {name}")
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    calls = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": most}
    return calls | {kind: found for kind, found in shared.items() if found}


def _share(known: dict[str, Any], own: Any, where: str) -> None:
    """References in a tool's parameters start at their own root, which is no longer the root."""
    if not isinstance(own, dict):
        return
    for name, schema in own.items():
        if known.setdefault(name, schema) != schema:
            raise invalid(where, f"{name[:100]!r} means something else in another tool; rename one")


def described(shown: list[dict[str, Any]]) -> str:
    """What a model is told of its tools where its chat template has no place for them, in the Hermes form."""
    lines = "\n".join(msgspec.json.encode(tool).decode() for tool in shown)
    return (
        "You may call one or more functions to assist with the user query. Function signatures are within "
        f"<tools></tools>:\n<tools>\n{lines}\n</tools>\nFor each function call, answer with a JSON object with its "
        "name and arguments within <tool_call></tool_call>:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def in_words(messages: list[dict[str, Any]], shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: they and their calls become text, in the Hermes form."""
    made = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        for call in message.get("tool_calls", ()):
            said = msgspec.json.encode(call["function"]).decode()
            plain["content"] = f"{plain['content']}\n<tool_call>\n{said}\n</tool_call>".lstrip()
        if message["role"] == "tool":
            plain |= {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        made.append(plain)
    if not shown:
        return made
    if made[0]["role"] == "system":
        return [made[0] | {"content": f"{made[0]['content']}\n\n{described(shown)}"}, *made[1:]]
    return [{"role": "system", "content": described(shown)}, *made]
