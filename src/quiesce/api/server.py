"""The routes: generation, models, health, metrics, and the ledgers for whoever debugs."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quiesce.api.errors import ApiError
from quiesce.api.generate import Front, Generate, check_model
from quiesce.api.guard import Guard
from quiesce.api.openapi import document
from quiesce.api.pages import Model, Models, Readiness
from quiesce.api.parse import parse_chat, parse_completion
from quiesce.api.response_shape import ResponseEvents, ResponseShape
from quiesce.api.responses import parse_response
from quiesce.api.shapes import ChatShape, CompletionShape
from quiesce.api.stream import text_events
from quiesce.api.texts import Texts
from quiesce.core.messages import Inspected

INSPECT_SECONDS = 5.0  # a worker on a busy machine may be slow for a second or two; a scrape waits for ten
PROBE_SECONDS = 5.0
ROLES = ("prefill", "decode", "colocated")
JSON = "application/json"


def make_app(front: Front) -> Starlette:
    """The ASGI application. `front.backend` must live in the same event loop."""
    pages, texts = Pages(front), Texts(front)
    chat = Generate(front, "/v1/chat/completions", parse_chat, ChatShape, text_events)
    completion = Generate(front, "/v1/completions", parse_completion, CompletionShape, text_events)
    response = Generate(front, "/v1/responses", parse_response, ResponseShape, ResponseEvents)
    routes = [
        Route(chat.route, chat, methods=["POST"]),
        Route(response.route, response, methods=["POST"]),
        Route(completion.route, completion, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/health", pages.health),
        Route("/ready", pages.ready),
        Route("/openapi.json", pages.openapi),
        Route("/metrics", pages.metrics),
        Route("/debug/ledger", pages.ledger),
    ]
    guard = [Middleware(Guard, access=front.access, refused=front.metrics.not_let_in)]
    return without_redirects(Starlette(routes=routes, middleware=guard, exception_handlers=ERRORS))


def without_redirects(app: Starlette) -> Starlette:
    """A path with a slash too many is unknown: a redirection would name the host and scheme that the client sent, and
    not every client repeats its body."""
    app.router.redirect_slashes = False
    return app


class Pages:
    """Everything that is not a generation."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())
        self._document = msgspec.json.encode(document(front.model, front.text.vocabulary_size))

    def _model(self) -> Model:
        return Model(self._front.model, self._created, self._front.backend.context_limit())

    async def models(self, request: Request) -> Response:
        return _json(Models([self._model()]))

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._front.model)
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """With `?probe=1` a test request goes through every worker first."""
        backend = self._front.backend
        passed = True
        probes: dict[str, Any] = {}
        if request.query_params.get("probe", "0") not in ("", "0"):
            probes = await backend.probe(PROBE_SECONDS)
            passed = not any(isinstance(answer, str) for answer in probes.values())
        healthy, detail = backend.health()
        if probes:
            detail = detail | {
                "probes": probes,
                "status": detail["status"] if passed or not healthy else "probe failed",
            }
        return _json(detail, 200 if healthy and passed else 503)

    async def ready(self, request: Request) -> Response:
        """For load balancers and Kubernetes: may this server be sent requests now? With `?role=decode`: is there a
        worker of that role that can be given work?"""
        if (role := request.query_params.get("role")) is not None:
            if role not in ROLES:
                raise ApiError(400, f"role: must be one of {', '.join(ROLES)}, not {role[:100]!r}", param="role")
            ready = self._front.backend.ready(role)
            return _json(
                Readiness(ready, "" if ready else f"no {role} worker can be given work"), 200 if ready else 503
            )
        refusal = self._front.backend.refusal()
        return _json(Readiness(refusal is None, refusal.message if refusal else ""), 503 if refusal else 200)

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        backend = self._front.backend
        workers = await backend.inspect(INSPECT_SECONDS)
        body = self._front.metrics.exposition(workers, backend.counters(), backend.legs())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def ledger(self, request: Request) -> Response:
        """Each worker's state; with `?page=17`, what its ownership log tells about that page."""
        workers = await self._front.backend.inspect(INSPECT_SECONDS, _page(request.query_params.get("page")))
        state = {
            name: answer.state if isinstance(answer, Inspected) else {"error": answer}
            for name, answer in sorted(workers.items())
        }
        return _json(state)


def _page(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ApiError(400, f"page: must be a page's number, 0 to 999999999, not {text[:100]!r}", param="page")
    return int(text)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    said = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return Response(said.body(), said.status, headers=dict(error.headers or {}), media_type=JSON)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return Response(error.body(), error.status, headers=retry, media_type=JSON)


ERRORS: Any = {HTTPException: _http_error, ApiError: _api_error}
