"""One generation request from its first byte to its last: read, check, tokenize, open, answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quiesce.api import prepare
from quiesce.api.access import Access, Key
from quiesce.api.answer import Answer
from quiesce.api.backend import Ask, Backend, Work
from quiesce.api.body import Bodies, ClientGone
from quiesce.api.chat import TextModel
from quiesce.api.errors import ApiError, unavailable
from quiesce.api.guard import KEY
from quiesce.api.metrics import FrontMetrics, Pace
from quiesce.api.parse import Wanted
from quiesce.api.reply import Reply, Sender, StreamedReply, WholeReply
from quiesce.api.shapes import Events, Shape, Usage, usage

log = logging.getLogger(__name__)

SLOW_READER_SECONDS = 5.0  # how long past its deadline an answer may still be on its way out
LABEL = re.compile(r"[\x21-\x7e]{1,128}")


class FrontLimits(msgspec.Struct, frozen=True):
    max_inflight: int = 1024
    request_timeout: float = 600.0  # seconds, from arrival to the last byte
    max_body: int = 8 << 20


class Front:
    """What all generation requests share."""

    def __init__(
        self,
        backend: Backend,
        text: TextModel,
        model: str,
        limits: FrontLimits,
        metrics: FrontMetrics,
        access: Access | None = None,
    ) -> None:
        self.backend = backend
        self.text = text
        self.model = model
        self.limits = limits
        self.metrics = metrics
        self.access = access or Access()
        self.bodies = Bodies(limits.max_body)
        self.inflight = 0

    def refuse_when_full(self) -> None:
        """Raises ApiError 503."""
        if self.inflight >= self.limits.max_inflight:
            raise unavailable(f"all {self.limits.max_inflight} places for requests are taken", "overloaded")


class Generate:
    """ASGI application of one endpoint."""

    def __init__(
        self,
        front: Front,
        route: str,
        parse: Callable[[bytes], Wanted],
        shape: type[Shape],
        events: Callable[[Any, Wanted], Events],
    ) -> None:
        self.front = front
        self.route = route
        self.parse = parse
        self.shape = shape
        self.events = events
        front.metrics.expect(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self.front.metrics
        metrics.inflight.inc()
        metrics.started.labels(self.route).inc()
        try:
            await Exchange(self, scope, receive, send).run()
        finally:
            metrics.inflight.dec()


class Exchange:
    """One request and its answer."""

    def __init__(self, endpoint: Generate, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoint = endpoint
        self._front = endpoint.front
        self._receive = receive
        self._headers = dict(scope["headers"])
        self._key: Key = scope[KEY]
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._deadline = self._arrived + self._front.limits.request_timeout
        self._rid = uuid.uuid4().hex
        self._label = _label(self._headers.get(b"x-request-id", b""))
        self._out = Sender(send, self._rid, self._label)
        self._usage: Usage | None = None
        self._why = ""

    async def run(self) -> None:
        try:
            # A client that does not read must not hold its place for ever.
            async with asyncio.timeout_at(self._deadline + SLOW_READER_SECONDS):
                await self._serve()
        except ApiError as error:
            await self._refuse(error)
        except ClientGone:
            self._out.status = 499
        except TimeoutError:
            self._out.status = 504
            self._why = ": its client did not read the answer before the deadline"
        except Exception:
            log.exception("it failed in the router", extra={"rid": self._rid})
            await self._refuse(ApiError(500, f"request {self._rid} failed inside the router; its log has the cause"))
        finally:
            self._record()

    def _age(self) -> float:
        return self._loop.time() - self._arrived

    def _record(self) -> None:
        """Metrics and one line in the log for every request."""
        metrics = self._front.metrics
        status = str(self._out.status)
        metrics.requests.labels(self._endpoint.route, status).inc()
        metrics.duration.labels(status).observe(self._age())
        prompt = answer = 0
        if self._usage is not None:
            prompt, answer = self._usage.prompt_tokens, self._usage.completion_tokens
            metrics.prompt_tokens.inc(prompt)
            metrics.generation_tokens.inc(answer)
            metrics.cached_tokens.inc(self._usage.prompt_tokens_details.cached_tokens)
        fields = {
            "rid": self._rid,
            "client_id": self._label or None,
            "tenant": self._key.tenant or None,
            "route": self._endpoint.route,
            "status": self._out.status,
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_ms": round(self._age() * 1000, 1),
        }
        said = (self._endpoint.route, status, prompt, answer, self._age(), self._why)
        log.info("%s: %s, %d + %d tokens, %.3f s%s", *said, extra=fields)

    async def _serve(self) -> None:
        self._front.refuse_when_full()  # without having read what it is
        self._key.enter(time.monotonic())
        try:
            raw = await self._front.bodies.read(self._receive, self._headers)
            await self._placed(raw)
        finally:
            self._key.leave()

    async def _placed(self, raw: bytes) -> None:
        """A request takes a place once all of it is there: half a body keeps nobody out."""
        self._front.refuse_when_full()
        self._front.inflight += 1
        try:
            await self._admitted(raw)
        finally:
            self._front.inflight -= 1

    async def _admitted(self, raw: bytes) -> None:
        front = self._front
        wanted = await front.text.parsed(self._endpoint.parse, raw)
        check_model(wanted.model or front.model, front.model)
        if wanted.ignored:
            self._out.warn_ignored(wanted.ignored)
        limit = self._limit()
        leaving = asyncio.create_task(self._until_gone())
        try:
            prompts = await prepare.tokenize(wanted, front.text, limit)
            asks = self._asks(wanted, prompts)
            self._key.afford(time.monotonic())
            answers = prepare.answers(wanted, asks, front.text)
            if leaving.done():
                raise ClientGone
            work = front.backend.open(asks)
            self._key.used(sum(map(len, prompts)))
            leaving.add_done_callback(lambda _: work.abandon("the client closed its connection"))
            try:
                await self._answer(work, wanted, asks, answers)
            finally:
                work.abandon("the answer could not be delivered")
                self._key.used(sum(answer.counted for answer in answers))
        finally:
            leaving.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _asks(self, wanted: Wanted, prompts: list[tuple[int, ...]]) -> list[Ask]:
        # The limit is asked for again: workers may have come or gone while the threads were at it.
        tenant = self._key.tenant
        label = self._label or _label(wanted.label.encode(errors="replace"))
        ids = {"rid": self._rid, "label": label, "tenant": tenant, "salt": salt_of(tenant, wanted.cache_salt)}
        defaults = self._front.text.sampling_defaults
        if wanted.timeout is not None:
            self._deadline = min(self._deadline, self._arrived + wanted.timeout)
        return prepare.asks(wanted, prompts, defaults, self._limit(), deadline=self._deadline, **ids)

    def _limit(self) -> int:
        limit = self._front.backend.context_limit()
        if limit is None:
            raise self._front.backend.refusal() or unavailable("no pair of workers is ready", "no_workers")
        return limit

    async def _answer(self, work: Work, wanted: Wanted, asks: list[Ask], answers: list[Answer]) -> None:
        reply = self._reply(wanted, asks, answers)
        running = len(answers)
        pace = Pace(self._front.metrics, self._arrived)
        while running:
            for delivery in await work.next():
                pace.took(delivery.index, len(delivery.token_ids), self._loop.time())
                answer = answers[delivery.index]
                step = answer.take(delivery)
                if step.verdict is not None and step.verdict.error is not None:
                    raise step.verdict.error
                if answer.stopped and step.verdict is None:
                    work.satisfied(delivery.index)
                running -= step.verdict is not None
                reply.add(delivery.index, step)
            if running:
                await reply.push()
        pace.end()
        total = _usage(wanted.n, asks, answers)
        await reply.end(total)
        self._usage = total

    def _reply(self, wanted: Wanted, asks: list[Ask], answers: list[Answer]) -> Reply:
        vocabulary = self._front.text.vocabulary
        form = self._front.text.tool_form
        shape = self._endpoint.shape(self._rid, self._front.model, vocabulary, wanted, form)
        if wanted.stream:
            return StreamedReply(self._out, self._endpoint.events(shape, wanted), answers)
        return WholeReply(self._out, shape, vocabulary, asks, answers, wanted.prompt_logprobs)

    async def _refuse(self, error: ApiError) -> None:
        self._why = f": {error.message}"
        if error.status == 499:  # the verdict on a request whose client left
            self._out.status = 499
        else:
            await self._out.error(error)


def salt_of(tenant: str, given: str) -> str:
    """What keeps one tenant's cached prompts from another, and one client's from another's where it wants that."""
    return f"{tenant}\0{given}" if tenant or given else ""


def check_model(asked: str, served: str) -> None:
    if asked != served:
        message = f"model: {asked[:200]!r} is not served here, only {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _usage(n: int, asks: list[Ask], answers: list[Answer]) -> Usage:
    """Each prompt counts once, however many samples it has."""
    cached = [answer.verdict.cached_tokens if answer.verdict else 0 for answer in answers]
    return usage(
        sum(len(ask.token_ids) for ask in asks[::n]),
        sum(answer.counted for answer in answers),
        sum(max(cached[i : i + n]) for i in range(0, len(cached), n)),
    )


def _label(given: bytes) -> str:
    """The client's id, when it is one that can be shown safely; it names nothing inside."""
    text = given.decode("latin-1")
    return text if LABEL.fullmatch(text) else ""
