"""One generation request from its first byte to its last: read, check, tokenize, open, answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import aclosing

import msgspec
from starlette.types import Message, Receive, Scope, Send

from quiesce.api.backend import Ask, Backend, Call, Verdict
from quiesce.api.chat import TextModel, too_long
from quiesce.api.detokenize import TextStream
from quiesce.api.errors import ApiError, invalid, unavailable
from quiesce.api.metrics import FrontMetrics
from quiesce.api.schemas import Wanted
from quiesce.api.stream import Events, Shape, Usage, steps
from quiesce.core.messages import Sampling

log = logging.getLogger(__name__)

BODY_SECONDS = 30.0
SLOW_READER_SECONDS = 5.0  # how long past its deadline an answer may still be on its way out
LABEL = re.compile(r"[\x21-\x7e]{1,128}")
Headers = Iterable[tuple[bytes, bytes]]


class FrontLimits(msgspec.Struct, frozen=True):
    max_inflight: int = 1024
    request_timeout: float = 600.0  # seconds, from arrival to the last byte
    max_body: int = 8 << 20


class Front:
    """What all generation requests share."""

    def __init__(
        self, backend: Backend, text: TextModel, model: str, limits: FrontLimits, metrics: FrontMetrics
    ) -> None:
        self.backend = backend
        self.text = text
        self.model = model
        self.limits = limits
        self.metrics = metrics
        self.inflight = 0


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Generate:
    """ASGI application of one endpoint."""

    def __init__(self, front: Front, route: str, parse: Callable[[bytes], Wanted], shape: type[Shape]) -> None:
        self.front = front
        self.route = route
        self.parse = parse
        self.shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self, scope, receive, send)
        metrics = self.front.metrics
        self.front.inflight += 1
        metrics.inflight.set(self.front.inflight)
        try:
            await exchange.run()
        finally:
            self.front.inflight -= 1
            metrics.inflight.set(self.front.inflight)
            status = str(exchange.status)
            metrics.requests.labels(self.route, status).inc()
            metrics.duration.labels(status).observe(exchange.age())


class Exchange:
    """One request and its answer. `status` is what the client got: 499 when it left first."""

    def __init__(self, endpoint: Generate, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoint = endpoint
        self._front = endpoint.front
        self._receive = receive
        self._send = send
        self._headers = dict(scope["headers"])
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._deadline = self._arrived + self._front.limits.request_timeout
        self._rid = uuid.uuid4().hex
        self._label = _label(self._headers.get(b"x-request-id", b""))
        self._warning: list[tuple[bytes, bytes]] = []
        self._started = False
        self.status = 500

    def age(self) -> float:
        return self._loop.time() - self._arrived

    async def run(self) -> None:
        try:
            # A client that does not read must not hold its place for ever.
            async with asyncio.timeout_at(self._deadline + SLOW_READER_SECONDS):
                await self._serve()
        except ApiError as error:
            await self._refuse(error)
        except ClientGone:
            self.status = 499
        except TimeoutError:
            self.status = 504
            log.warning("request %s: its client did not read the answer before the deadline", self._rid)
        except Exception:
            log.exception("request %s failed in the router", self._rid)
            await self._refuse(ApiError(500, f"request {self._rid} failed inside the router; its log has the cause"))

    async def _serve(self) -> None:
        front = self._front
        if front.inflight > front.limits.max_inflight:
            raise unavailable(f"all {front.limits.max_inflight} places for requests are taken", "overloaded")
        wanted = self._endpoint.parse(await self._body())
        if wanted.model != front.model:
            message = f"model: {wanted.model[:200]!r} is not served here, only {front.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if wanted.ignored:
            self._warning = [(b"warning", f'299 - "ignored: {", ".join(wanted.ignored)}"'.encode())]
        if (refusal := front.backend.refusal()) is not None:
            raise refusal
        leaving = asyncio.create_task(self._until_gone())
        try:
            prompt, sampling = await self._prepare(wanted)
            if leaving.done():
                raise ClientGone
            call = front.backend.open(Ask(self._rid, self._label, prompt, sampling, self._deadline))
            leaving.add_done_callback(lambda _: call.abandon("the client closed its connection"))
            try:
                await self._answer(call, wanted, len(prompt))
            finally:
                call.abandon("the answer could not be delivered")
        finally:
            leaving.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _body(self) -> bytes:
        limit = self._front.limits.max_body
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        with contextlib.suppress(ValueError):
            if int(self._headers.get(b"content-length", b"0")) > limit:
                raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message: Message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None

    async def _prepare(self, wanted: Wanted) -> tuple[tuple[int, ...], Sampling]:
        """Token ids and sampling, inside the limit. Nothing has been sent to a worker yet."""
        limit = self._limit()
        prompt = await self._front.text.encode(wanted.prompt, limit)
        limit = self._limit()  # workers may have come or gone while the threads were at it
        param = "prompt" if isinstance(wanted.prompt, str) or isinstance(wanted.prompt[0], int) else "messages"
        if len(prompt) >= limit:
            raise too_long(param, len(prompt), limit)
        room = limit - len(prompt)
        max_tokens = room if wanted.max_tokens is None else wanted.max_tokens
        if max_tokens > room:
            raise invalid(
                "max_tokens",
                f"{max_tokens} and the prompt's {len(prompt)} tokens are more than the {limit} tokens that prompt "
                f"and answer together may have here; at most {room} are left",
                "context_length_exceeded",
            )
        greedy = wanted.temperature == 0
        seed = wanted.seed if wanted.seed is not None else 0 if greedy else random.getrandbits(63)
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=seed,
            stop_token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
        )
        return prompt, sampling

    def _limit(self) -> int:
        limit = self._front.backend.context_limit()
        if limit is None:
            raise self._front.backend.refusal() or unavailable("no pair of workers is ready", "no_workers")
        return limit

    async def _answer(self, call: Call, wanted: Wanted, prompt_tokens: int) -> None:
        silent = (*wanted.stop_token_ids, *(() if wanted.ignore_eos else self._front.text.eos_ids))
        text = TextStream(self._front.text.vocabulary, wanted.stops, silent)
        shape = self._endpoint.shape(self._rid, self._front.model)
        events = Events(shape, wanted.include_usage) if wanted.stream else None
        pieces: list[str] = []
        first = True
        async with aclosing(steps(call, text)) as arriving:
            async for step in arriving:
                if first and text.counted:
                    self._front.metrics.first_token.observe(self.age())
                    first = False
                verdict = step.verdict
                if verdict is not None and verdict.error is not None:
                    raise verdict.error
                usage = Usage(prompt_tokens, text.counted, verdict.cached_tokens if verdict else 0)
                if events is None:
                    pieces.append(step.text)
                    if verdict is not None:
                        await self._whole(200, shape.whole("".join(pieces), verdict.finish_reason, usage))
                else:
                    await self._event(events, step.text, verdict, usage)
                if verdict is not None:
                    self._count(usage)

    async def _event(self, events: Events, text: str, verdict: Verdict | None, usage: Usage) -> None:
        frame = b"" if self._started else events.first()
        if not self._started:
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await self._start(200, [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        frame += events.text(text)
        if verdict is not None:
            frame += events.last(verdict.finish_reason, usage)
        if frame:
            await self._send({"type": "http.response.body", "body": frame, "more_body": verdict is None})

    async def _refuse(self, error: ApiError) -> None:
        if error.status == 499:  # the verdict on a request whose client left
            self.status = 499
            return
        log.info("request %s (%s): %d %s", self._rid, self._label or "-", error.status, error.message)
        if self._started:
            self.status = error.status
            await self._send({"type": "http.response.body", "body": Events.error(error), "more_body": False})
            return
        retry = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        await self._whole(error.status, error.body(), retry)

    async def _whole(self, status: int, body: bytes, headers: Headers = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", b"application/json"), length, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Headers) -> None:
        ids = [
            (b"x-request-id", (self._label or self._rid).encode()),
            (b"x-quiesce-request-id", self._rid.encode()),
        ]
        self.status = status
        self._started = True
        message = {"type": "http.response.start", "status": status, "headers": [*headers, *ids, *self._warning]}
        await self._send(message)

    def _count(self, usage: Usage) -> None:
        tokens = self._front.metrics.tokens
        tokens.labels("prompt").inc(usage.prompt_tokens)
        tokens.labels("completion").inc(usage.completion_tokens)
        tokens.labels("cached").inc(usage.cached_tokens)


def _label(given: bytes) -> str:
    """The client's id, when it is one that can be shown safely; it names nothing inside."""
    text = given.decode("latin-1")
    return text if LABEL.fullmatch(text) else ""
