"""The OpenAPI document, written from the structs that are decoded and encoded and from their tables of limits."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec

from quiesce.api import responses, schemas
from quiesce.api.pages import ErrorBody, Model, Models, Readiness
from quiesce.api.response_shape import ResponseAnswer
from quiesce.api.responses import ResponsesBody
from quiesce.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quiesce.api.shapes import ChatCompletion, Completion
from quiesce.api.texts import Detokenized, Tokenized

Schema = dict[str, Any]
REQUESTS = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)
ANSWERS = (ChatCompletion, Completion, ResponseAnswer, Tokenized, Detokenized, Model, Models, Readiness, ErrorBody)
STATUSES = {
    400: "The body is not valid, or asks for what this server or its limits do not allow; `param` names the field.",
    401: "API keys are needed here, and this is none of them.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    429: "This key has used up its requests, its tokens or its places; Retry-After says when to come back.",
    413: "The body is larger than this server takes.",
    409: "The workers do not agree on what was to be computed.",
    500: "The request failed in a worker or in the server.",
    502: "A worker was lost before the first token.",
    503: "No worker can take the request now; Retry-After says when to come back.",
    504: "The request took longer than a request may.",
}


def document(model: str, vocabulary: int) -> Schema:
    """OpenAPI 3.1 for a server of this model; token ids are below `vocabulary`."""
    _, components = msgspec.json.schema_components((*REQUESTS, *ANSWERS), ref_template="#/components/schemas/{name}")
    for name in ("Common", *(body.__name__ for body in REQUESTS)):
        if name in components and name != ResponsesBody.__name__:
            fields = components[name]["properties"]
            _limit(fields, model, vocabulary)
            for field, rule in RULES.items():
                if field in fields:
                    fields[field]["description"] = rule
    _narrow_messages(components)
    _either(components["TokenizeBody"])
    _narrow_responses(components[ResponsesBody.__name__]["properties"], model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quiesce", "version": importlib.metadata.version("quiesce"), "description": ABOUT},
        "paths": _paths(),
        "components": {"schemas": components},
    }


# What ties a field to others, or to what workers can take, and so cannot be said in a schema.
RULES = {
    "max_tokens": "At least 1 unless `echo` is true; with the prompt at most `max_model_len` of /v1/models, which is "
    "also the default.",
    "max_completion_tokens": "As `max_tokens`, and wins over it.",
    "min_tokens": "At most `max_tokens`.",
    "top_logprobs": "Only together with `logprobs: true`.",
    "prompt_logprobs": "Not together with `stream: true`.",
    "stream_options": "Only together with `stream: true`.",
    "priority": "Requests of a lower one are served first.",
    "timeout": "Seconds from arrival to the last byte; the server's own limit stands above it.",
    "best_of": "Absent or equal to `n`.",
    "n": f"Prompts times `n` is at most {schemas.MAX_ANSWERS}.",
    "response_format": "At most one of this and the other fields that say what an answer must be.",
    "structured_outputs": "Exactly one of its fields. vLLM's; the guided_ fields are its older spelling.",
    "guided_json": "A JSON schema, or the text of one.",
    "regex": "The whole answer matches it. SGLang's, as is `ebnf`.",
    "ebnf": "GBNF (`root ::= ...`) or Lark (`start: ...`).",
    "tools": "At most 128, each with a name of its own.",
    "tool_choice": "`required` and a named tool force a call by a grammar, and exclude `response_format`.",
    "logit_bias": "Token ids of the vocabulary, written in digits, and what is added to their logits.",
}
ABOUT = (
    "OpenAI's API, with extensions of vLLM's. Every field that is not named here is refused; hints that are "
    "accepted and have no effect are named in a Warning header of the answer. Answers carry the client's "
    "X-Request-Id and an X-Quiesce-Request-Id of this server. A stream that fails ends in an event with an "
    "`error` and has no `[DONE]`."
)


# ---------------------------------------------------------------- schemas


def _limit(fields: dict[str, Schema], model: str, vocabulary: int) -> None:
    """Writes the tables of limits into the fields of one body."""
    for name, field in fields.items():
        if name in schemas.RANGES:
            field.update(_number(field, name, schemas.RANGES[name]))
        elif name in schemas.ASKS_NOTHING:
            fields[name] = {"enum": [None, *schemas.ASKS_NOTHING[name]], "description": "Not served yet."}
        elif name in schemas.IGNORED:
            fields[name] = {"description": "Accepted without effect, and named in a Warning header."}
        elif name == "model":
            fields[name] = {"enum": [model] if "default" not in field else [model, None]}
    token = {"type": "integer", "minimum": 0, "maximum": vocabulary - 1}
    null = {"type": "null"}
    special = {
        "cache_salt": _text(schemas.MAX_SALT, null),
        "prompt": _prompt(token) if "logprobs" in fields else _text(schemas.MAX_TEXT, null),
        "logit_bias": {"anyOf": [_biases(), null]},
        "stop": {"anyOf": [_stop(), {"type": "array", "maxItems": schemas.MAX_STOPS, "items": _stop()}, null]},
        "stop_token_ids": {"anyOf": [{"type": "array", "maxItems": schemas.MAX_STOP_TOKENS, "items": token}, null]},
        "tokens": {"type": "array", "maxItems": schemas.MAX_TOKENS, "items": token},
    }
    if "echo" in fields:
        special["logprobs"] = _number({"anyOf": [{"type": "integer"}, null]}, "logprobs", schemas.LOGPROBS)
    fields.update({name: schema for name, schema in special.items() if name in fields})


def _number(field: Schema, name: str, limits: tuple[float, float]) -> Schema:
    lowest = "exclusiveMinimum" if name in schemas.ABOVE else "minimum"
    bounds = {lowest: limits[0], "maximum": limits[1]}
    kinds = [kind | bounds if kind["type"] != "null" else kind for kind in field["anyOf"]]
    return {"anyOf": kinds}


def _text(longest: int, *others: Schema) -> Schema:
    text = {"type": "string", "maxLength": longest}
    return {"anyOf": [text, *others]} if others else text


def _stop() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": schemas.MAX_STOP_CHARACTERS}


def _biases() -> Schema:
    low, high = schemas.BIAS
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "maxProperties": schemas.MAX_BIASES,
        "additionalProperties": {"type": "number", "minimum": low, "maximum": high},
    }


def _prompt(token: Schema) -> Schema:
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "minItems": 1, "items": token}
    several = {"type": "array", "minItems": 1, "maxItems": schemas.MAX_ANSWERS, "items": {"anyOf": [text, ids]}}
    return {"anyOf": [text, ids, several], "description": "A text, token ids, or a list of such prompts."}


def _narrow_messages(components: dict[str, Schema]) -> None:
    """What messages may hold of all that is known of them."""
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    del components["Part"]
    message = components["ChatMessage"]
    fields = message["properties"]
    for name, values in schemas.ASKS_NOTHING_IN_MESSAGE.items():
        fields[name] = {"enum": [None, *values], "description": "Not served yet."}
    fields["role"] = {"enum": ["system", "developer", "user", "assistant", "tool"]}
    null = {"type": "null", "description": "Only beside `tool_calls`."}
    fields["content"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}, null]}
    fields["tool_call_id"]["description"] = "In `tool` messages, and in no others."
    fields["tool_calls"]["description"] = "In `assistant` messages alone; arguments are the text of a JSON object."
    message["required"] = ["role"]
    components["ChatBody"]["properties"]["messages"]["minItems"] = 1


def _narrow_responses(fields: dict[str, Schema], model: str) -> None:
    for name, values in responses.NOTHING.items():
        fields[name] = {"enum": [None, *values], "description": responses.WHY.get(name, "Not served yet.")}
    for name in responses.HINTS:
        fields[name] = {"description": "Accepted without effect, and named in a Warning header."}
    fields["model"] = {"enum": [model]}
    null = {"type": "null"}
    fields["max_output_tokens"] = {"anyOf": [{"type": "integer", "minimum": 1}, null]}
    for name in ("temperature", "top_p", "top_logprobs"):
        fields[name] = _number(fields[name], name, schemas.RANGES[name])


def _either(body: Schema) -> None:
    """Splits /tokenize's body into its two kinds."""
    fields = body["properties"]
    kinds: list[Schema] = []
    for wanted, other in (("prompt", "messages"), ("messages", "prompt")):
        value = next(kind for kind in fields[wanted]["anyOf"] if kind.get("type") != "null")
        own = {name: field for name, field in fields.items() if name != other} | {
            wanted: value,
            other: {"type": "null"},
        }
        kinds.append({"type": "object", "properties": own, "required": [wanted], "additionalProperties": False})
    kinds[1]["properties"]["messages"]["minItems"] = 1
    body.clear()
    body["oneOf"] = kinds


# ---------------------------------------------------------------- paths


def _paths() -> Schema:
    stream = {
        "text/event-stream": {"schema": {"description": "With `stream: true`: chunks of the answer as events."}}
    }
    chat = _post("ChatBody", "ChatCompletion", "Answers the last message of a chat.", more=stream)
    completion = _post("CompletionBody", "Completion", "Continues each prompt.", more=stream)
    response = _post("ResponsesBody", "ResponseAnswer", "Answers a chat in OpenAI's newer shape.", more=stream)
    few = (400, 401, 404, 408, 413)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    health = {"schema": {"type": "object", "description": "Roles, workers, and what is missing, for people."}}
    page = {"name": "page", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999}}
    ledger = {"schema": {"type": "object", "additionalProperties": {"type": "object"}}}
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/responses": {"post": response},
        "/v1/models": {"get": _get("The one model that is served.", _json("Models"))},
        "/v1/models/{name}": {
            "get": _get("The model of this name.", _json("Model"), _errors(404)) | {"parameters": [name]}
        },
        "/tokenize": {"post": _post("TokenizeBody", "Tokenized", "Token ids of a text or of messages.", few)},
        "/detokenize": {"post": _post("DetokenizeBody", "Detokenized", "The text of token ids.", few)},
        "/ready": {"get": _ready(_json("Readiness"))},
        "/health": {"get": _ready({"application/json": health})},
        "/metrics": {"get": _get("Metrics of server and workers.", {"text/plain": {"schema": {"type": "string"}}})},
        "/debug/ledger": {
            "get": _get(
                "The workers' page ledgers, or one page's history.", {"application/json": ledger}, _errors(400)
            )
            | {"parameters": [page]}
        },
        "/openapi.json": {"get": _get("This document.", {"application/json": {"schema": {"type": "object"}}})},
    }


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _errors(*statuses: int) -> Schema:
    return {str(status): {"description": STATUSES[status], "content": _json("ErrorBody")} for status in statuses}


def _get(summary: str, content: Schema, errors: Schema | None = None) -> Schema:
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}} | (errors or {})}


def _ready(content: Schema) -> Schema:
    not_now = {"503": {"description": "Not now; the body says why.", "content": content}}
    return _get("Whether a request would be served now.", content, not_now)


def _post(body: str, answer: str, summary: str, statuses: tuple[int, ...] = (), more: Schema | None = None) -> Schema:
    responses = _get(summary, _json(answer) | (more or {}), _errors(*(statuses or sorted(STATUSES))))
    return responses | {"requestBody": {"required": True, "content": _json(body)}}
