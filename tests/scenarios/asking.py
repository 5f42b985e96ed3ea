"""Asks a server over HTTP, whole or streamed, and brings both kinds of answer into one form to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from e2e.product import Product

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(product: Product, path: str, body: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    """{"status", "error" or ("choices": [{"text", "finish_reason", "logprobs"}], "usage")}."""
    whole = {"model": product.name, "temperature": 0, **body}
    if not stream:
        answer = product.http.post(path, json=whole)
        said = answer.json()
        if answer.status_code != 200:
            return {"status": answer.status_code, "error": said["error"]}
        return {"status": 200, "choices": [_whole(choice) for choice in said["choices"]], "usage": said["usage"]}
    options = {**(body.get("stream_options") or {}), "include_usage": True}
    with product.http.stream("POST", path, json={**whole, "stream": True, "stream_options": options}) as answer:
        if answer.status_code != 200:
            return {"status": answer.status_code, "error": json.loads(answer.read())["error"]}
        return {"status": 200, **joined(list(events(answer)))}


def events(answer: httpx.Response) -> Iterator[str]:
    """The data of each event, `[DONE]` included."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield line[6:]


def joined(data: list[str]) -> dict[str, Any]:
    """What the events of a whole stream add up to."""
    assert data[-1] == "[DONE]", data[-1]
    parsed = [json.loads(event) for event in data[:-1]]
    choices: dict[int, dict[str, Any]] = {}
    for event in parsed:
        for choice in event["choices"]:
            known = choices.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": None})
            known["text"] += _text(choice)
            known["logprobs"] = _added(known["logprobs"], choice.get("logprobs"))
            assert known["finish_reason"] is None or not _text(choice), "text after the end"
            known["finish_reason"] = choice["finish_reason"] or known["finish_reason"]
    usages = [event["usage"] for event in parsed if event.get("usage")]
    assert len(usages) == 1 and parsed[-1]["choices"] == [], "usage comes once, at the end"
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usages[0]}


def _text(choice: dict[str, Any]) -> str:
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": _text(choice),
        "finish_reason": choice["finish_reason"],
        "logprobs": _added(None, choice["logprobs"]),
    }


def _added(known: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    """Lists one after another; `refusal: null` of chat says nothing."""
    if more is None:
        return known
    lists = {name: value for name, value in more.items() if value is not None}
    return {name: (known or {}).get(name, []) + lists[name] for name in lists}


@contextmanager
def opened(product: Product, body: dict[str, Any]) -> Iterator[httpx.Response]:
    """A streamed completion to read by hand."""
    whole = {"model": product.name, "temperature": 0, "stream": True, **body}
    with product.http.stream("POST", COMPLETIONS, json=whole) as answer:
        yield answer
