"""/tokenize, /detokenize, /ready, and the document at /openapi.json."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from quiesce.api import schemas
from quiesce.api.chat import TextModel
from quiesce.api.pages import ErrorBody
from quiesce.api.schemas import ChatBody, CompletionBody
from quiesce.api.shapes import ChatCompletion, Completion
from quiesce.api.texts import Tokenized
from router.cluster import Cluster, body, cluster, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, text) as made:
        yield made


async def test_a_text_becomes_ids_and_the_ids_that_text(c: Cluster, text: TextModel) -> None:
    words = "the 漢字 <|im_end|>"
    answer = await c.client.post("/tokenize", json={"model": "tiny", "prompt": words, "return_token_strs": True})
    found = answer.json()
    assert found["tokens"] == text._tokenizer.encode(words).ids
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert found["token_strs"] == [text.vocabulary.shown(id)[0] for id in found["tokens"]]
    back = await c.client.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": words}
    assert (await c.client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await c.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_messages_become_the_ids_that_a_chat_would_send(c: Cluster) -> None:
    chat = body()
    found = (await c.client.post("/tokenize", json={"messages": chat["messages"]})).json()
    await c.chat()
    (start,) = c.decode.starts.values()
    assert tuple(found["tokens"]) == start.token_ids and "token_strs" not in found
    fields = {"messages": chat["messages"], "add_generation_prompt": False}
    shorter = (await c.client.post("/tokenize", json=fields)).json()["tokens"]
    assert shorter == found["tokens"][: len(shorter)] and len(shorter) < len(found["tokens"])


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * (schemas.MAX_TEXT + 1)}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "unknown": 1}, 400, "unknown"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * (schemas.MAX_TOKENS + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": "5"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_converted_is_named(
    c: Cluster, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await c.client.post(path, json=fields)
    assert answer.status_code == status and answer.json()["error"]["param"] == param


async def test_a_body_over_the_limit_is_413_here_too(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, max_body=1024) as c:
        answer = await c.client.post("/tokenize", json={"prompt": "x" * 2000})
        assert answer.status_code == 413


async def test_ready_follows_the_workers_and_the_draining(tmp_path: Path, text: TextModel) -> None:
    held = [{"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, held, drain_timeout=30.0) as c:
        answer = await c.client.get("/ready")
        assert answer.status_code == 503 and not answer.json()["ready"]
        assert "no prefill worker" in answer.json()["reason"]
        assert (await c.client.post("/tokenize", json={"prompt": "x"})).json()["max_model_len"] is None
        await c.add("prefill")
        await c.usable()
        answer = await c.client.get("/ready")
        assert answer.status_code == 200 and answer.json() == {"ready": True, "reason": ""}
        running = asyncio.create_task(c.chat())
        rid = await until(lambda: next(iter(c.decode.active), None))
        c.router.stop()
        answer = await c.client.get("/ready")
        assert answer.status_code == 503 and "shutting down" in answer.json()["reason"]
        c.decode.tokens(rid, *[40] * 4)
        c.decode.end(rid, "length")
        assert (await running).status_code == 200


async def test_the_document_has_every_route_and_no_other(c: Cluster) -> None:
    document = (await c.client.get("/openapi.json")).json()
    app = c.router._server.config.app
    routes = {
        (route.path.replace("{name:path}", "{name}"), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    documented = {(path, method) for path, entry in document["paths"].items() for method in entry}
    assert documented == routes
    for path, entry in document["paths"].items():
        for method in {"get", "post"} - set(entry):
            answer = await c.client.request(method, path.replace("{name}", "tiny"))
            assert answer.status_code == 405 and answer.headers["allow"]


async def test_the_document_has_every_field_and_limit_of_the_bodies(c: Cluster) -> None:
    components = (await c.client.get("/openapi.json")).json()["components"]["schemas"]
    for kind in (ChatBody, CompletionBody):
        schema = components[kind.__name__]
        assert set(schema["properties"]) == set(kind.__struct_fields__) and schema["additionalProperties"] is False
        for name in set(kind.__struct_fields__) & set(schemas.RANGES):
            number = schema["properties"][name]["anyOf"][0]
            low, high = schemas.RANGES[name]
            assert (number.get("minimum", number.get("exclusiveMinimum")), number["maximum"]) == (low, high)
    assert components["ChatBody"]["properties"]["model"] == {"enum": ["tiny"]}


async def test_answers_are_what_the_document_says(c: Cluster) -> None:
    """Decoding with the documented structs refuses what is missing or of another type."""
    whole: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "n": 2}
    answers = [
        (await c.chat(**whole), ChatCompletion),
        (await c.chat(), ChatCompletion),
        (await c.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "logprobs": 1}), Completion),
        (await c.client.post("/tokenize", json={"prompt": "x"}), Tokenized),
        (await c.chat(n=0), ErrorBody),
    ]
    for answer, kind in answers:
        made = msgspec.json.decode(answer.content, type=kind)
        assert msgspec.to_builtins(made) == answer.json()  # nothing more than that
