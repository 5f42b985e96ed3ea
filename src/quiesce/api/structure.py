"""What an answer must be: the fields that OpenAI, vLLM and SGLang have for it, as one grammar for the workers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from quiesce.api.errors import ApiError, invalid
from quiesce.engine.grammar import MAX_GRAMMAR

MAX_CHOICES = 1024
MAX_GBNF = 64 << 10  # bytes; its translation takes a second for them
MAX_GBNF_RULES = 256  # it takes the square of their number
FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
)
NAMES = ("json", "regex", "choice", "grammar", "json_object")  # within structured_outputs
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# One way to write each value: a model that likes white space could fill its whole answer with it.
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, rename={"body": "schema"}):
    """`name`, `description` and `strict` change nothing: every answer is held to its schema."""

    name: str
    body: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(body: Any) -> str:
    """The grammar that a body asks for; empty when it asks for none. Raises ApiError 400.

    Checks shapes and sizes alone: whether a grammar can be used is known when it has been compiled.
    """
    found = {name: made for name in FIELDS if (made := _made(name, getattr(body, name, None)))}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"cannot be combined with {first}: an answer has one form")
    return next(iter(found.values()), "")


def _made(name: str, value: Any) -> str:
    if value is None:
        return ""
    match name:
        case "response_format":
            return _of_format(value)
        case "structured_outputs":
            return _of_structured(value)
        case "guided_json":
            return of_schema(value, name)
        case "guided_choice":
            return of_choice(value, name)
        case "guided_grammar" | "ebnf":
            return of_ebnf(value, name)
    return of_regex(value, name)


def _of_format(given: ResponseFormat) -> str:
    match given.type:
        case "text":
            return ""
        case "json_object":
            return of_schema(ANY_OBJECT, "response_format")
        case "json_schema":
            if given.json_schema is None or given.json_schema.body is None:
                raise invalid("response_format.json_schema.schema", "must be there with type json_schema")
            return of_schema(given.json_schema.body, "response_format.json_schema.schema")
    kinds = "text, json_object and json_schema"
    raise invalid("response_format.type", f"{given.type[:100]!r} is not supported, only {kinds}")


def _of_structured(given: StructuredOutputs) -> str:
    there = [name for name in NAMES if getattr(given, name) not in (None, False)]
    if len(there) != 1:
        raise invalid("structured_outputs", f"must hold exactly one of {', '.join(NAMES)}, has {len(there)}")
    (name,) = there
    where = f"structured_outputs.{name}"
    value = getattr(given, name)
    match name:
        case "json":
            return of_schema(value, where)
        case "json_object":
            return of_schema(ANY_OBJECT, where)
        case "choice":
            return of_choice(value, where)
        case "grammar":
            return of_ebnf(value, where)
    return of_regex(value, where)


def of_schema(schema: str | dict[str, Any], where: str) -> str:
    """schema: JSON Schema, or the text of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(where, f"is not JSON: {error}"[:300]) from None
        if not isinstance(schema, dict):
            raise invalid(where, "must be a JSON object")
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # numbers or depths beyond its JSON
        raise invalid(where, f"is not a JSON schema that can be read: {error}"[:300]) from None
    return _bounded(grammar, where)


def of_regex(regex: str, where: str) -> str:
    """The whole answer must match it."""
    if not regex:
        raise invalid(where, "must not be empty")
    return _bounded(LLMatcher.grammar_from_regex(regex), where)


def of_choice(choices: list[str], where: str) -> str:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise invalid(where, f"must be 1 to {MAX_CHOICES} texts, none of them empty")
    return _bounded(LLMatcher.grammar_from_lark(f"start: {' | '.join(_quoted(choice) for choice in choices)}"), where)


def of_ebnf(text: str, where: str) -> str:
    """GBNF, as llama.cpp, vLLM and SGLang take it (`root ::= ...`), or Lark (`start: ...`)."""
    if "::=" not in text:
        return _bounded(LLMatcher.grammar_from_lark(text), where)
    if len(text.encode()) > MAX_GBNF or text.count("::=") > MAX_GBNF_RULES:
        limits = f"{MAX_GBNF} bytes and {MAX_GBNF_RULES} rules"
        raise invalid(where, f"has {len(text.encode())} bytes and {text.count('::=')} rules, GBNF may have {limits}")
    try:
        return _bounded(LLMatcher.grammar_from_lark(gbnf_to_lark(text)), where)
    except (GbnfToLarkError, ValueError, IndexError, KeyError, RecursionError) as error:
        raise invalid(where, f"is not a grammar: {' '.join(str(error).split())}"[:300]) from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _bounded(grammar: str, where: str) -> str:
    size = len(grammar.encode())
    if size > MAX_GRAMMAR:
        raise invalid(where, f"makes a grammar of {size} bytes, at most {MAX_GRAMMAR} are taken")
    return grammar


def unusable(where: str, why: str) -> ApiError:
    """A grammar that cannot be compiled, naming what is not supported."""
    return invalid(where, f"cannot be used: {why}", "unsupported_grammar")


def field_of(body: Any) -> str:
    """Which field of a body has the grammar."""
    return next((name for name in FIELDS if getattr(body, name, None) is not None), "response_format")
