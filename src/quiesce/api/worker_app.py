"""What one worker answers to the routers of others: SGLang's paths, over the front door's handling of requests."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quiesce.api.access import Key
from quiesce.api.backend import Backend
from quiesce.api.body import ClientGone
from quiesce.api.errors import ApiError
from quiesce.api.generate import Front, Generate
from quiesce.api.guard import KEY, Guard
from quiesce.api.pages import Model, Models
from quiesce.api.parse import decode
from quiesce.api.server import ERRORS, PROBE_SECONDS, without_redirects
from quiesce.api.sglang import GenerateEvents, GenerateShape, parse_chat_leg, parse_completion_leg, parse_generate
from quiesce.api.shapes import ChatShape, CompletionShape
from quiesce.api.stream import text_events

MAX_ABORT_BODY = 64 << 10


class Port(Backend, Protocol):
    """A backend that is one worker."""

    name: str
    port: int

    @property
    def worker(self) -> Any: ...

    def abort(self, name: str | None, tenant: str | None) -> int: ...


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


_abort = msgspec.json.Decoder(AbortBody)


def make_worker_app(front: Front, port: Port) -> Starlette:
    """The ASGI application of one worker's port."""
    pages = WorkerPages(front, port)
    chat = Generate(front, "/v1/chat/completions", parse_chat_leg, ChatShape, text_events)
    completion = Generate(front, "/v1/completions", parse_completion_leg, CompletionShape, text_events)
    generate = Generate(front, "/generate", parse_generate, GenerateShape, GenerateEvents)
    routes = [Route(one.route, one, methods=["POST"]) for one in (chat, completion, generate)]
    routes += [
        Route("/v1/models", pages.models),
        Route("/model_info", pages.model_info),
        Route("/get_model_info", pages.model_info),
        Route("/server_info", pages.server_info),
        Route("/get_server_info", pages.server_info),
        Route("/get_load", pages.load),
        Route("/health", pages.health),
        Route("/health_generate", pages.health_generate),
        Route("/flush_cache", pages.flush_cache, methods=["GET", "POST"]),
        Route("/abort_request", pages.abort, methods=["POST"]),
    ]
    guard = [Middleware(Guard, access=front.access, refused=front.metrics.not_let_in)]
    return without_redirects(Starlette(routes=routes, middleware=guard, exception_handlers=ERRORS))


class WorkerPages:
    def __init__(self, front: Front, port: Port) -> None:
        self._front = front
        self._port = port

    async def models(self, request: Request) -> Response:
        return _json(Models([Model(self._front.model, 0, self._port.context_limit())]))

    async def model_info(self, request: Request) -> Response:
        model = self._front.model
        info = {"model_path": model, "tokenizer_path": model, "served_model_name": model, "is_generation": True}
        return _json(info | {"preferred_sampling_params": None, "weight_version": "default"})

    async def server_info(self, request: Request) -> Response:
        worker = self._port.worker
        if worker is None:
            raise self._port.refusal() or ApiError(503, f"{self._port.name} is not registered")
        latest = worker.latest
        role = {"colocated": "null"}.get(latest.role, latest.role)
        info = {
            "model_path": self._front.model,
            "tokenizer_path": self._front.model,
            "served_model_name": self._front.model,
            "disaggregation_mode": role,
            "disaggregation_bootstrap_port": self._port.port if role == "prefill" else None,
            "max_total_num_tokens": latest.limits.pool_tokens,
            "context_length": latest.limits.context_length,
            "max_req_input_len": self._port.context_limit(),
            "page_size": latest.fingerprint.page_size,
            "dtype": latest.fingerprint.dtype,
            "tp_size": latest.fingerprint.ranks,
            "dp_size": 1,
            "version": f"quiesce-{importlib.metadata.version('quiesce')}",
        }
        return _json(info)

    async def load(self, request: Request) -> Response:
        worker = self._port.worker
        running, queued = (worker.latest.running, worker.latest.queued) if worker else (0, 0)
        waiting = worker.latest.waiting_tokens if worker else 0
        return _json(
            [{"dp_rank": 0, "num_reqs": running + queued, "num_waiting_reqs": queued, "num_tokens": waiting}]
        )

    async def health(self, request: Request) -> Response:
        """Red as well when work is queued and nothing moves."""
        healthy, detail = self._port.health()
        return _json(detail, 200 if healthy else 503)

    async def health_generate(self, request: Request) -> Response:
        """A test request goes through this worker alone."""
        healthy, detail = self._port.health()
        if healthy:
            answer = (await self._port.probe(PROBE_SECONDS)).get(self._port.name)
            healthy = isinstance(answer, float | int)
            detail["missing"] = [] if healthy else [f"{self._port.name}: {answer}"]
        return _json(detail, 200 if healthy else 503)

    async def flush_cache(self, request: Request) -> Response:
        return Response("Nothing is cached between requests.\n", media_type="text/plain")

    async def abort(self, request: Request) -> Response:
        """Of exactly that id: its `rid`, or the X-Request-Id it came with. A key reaches its own tenant's alone."""
        try:
            raw = await self._front.bodies.read(request.receive, dict(request.headers.raw), MAX_ABORT_BODY)
            body = decode(_abort, raw)
        except ClientGone:
            return Response(status_code=499)
        if not body.rid and not body.abort_all:
            raise ApiError(400, "rid: must be there, or abort_all", param="rid")
        key: Key = request.scope[KEY]
        named = None if body.abort_all else body.rid
        return _json({"aborted": self._port.abort(named, None if key.admin else key.tenant)})


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
