"""What goes back to the client: one JSON body, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import UNSET
from starlette.types import Send

from quiesce.api.answer import Answer, Entry, Step
from quiesce.api.backend import Ask
from quiesce.api.detokenize import Vocabulary
from quiesce.api.errors import ApiError
from quiesce.api.logprobs import prompt_logprobs
from quiesce.api.shapes import Choice, Events, Shape, Usage
from quiesce.api.stream import error_event

Headers = Iterable[tuple[bytes, bytes]]


class Sender:
    """The answer's way out. `status` is what the client got: 499 when it left first."""

    def __init__(self, send: Send, rid: str, label: str) -> None:
        self._send = send
        self._ids = [(b"x-request-id", (label or rid).encode()), (b"x-quiesce-request-id", rid.encode())]
        self.warning: list[tuple[bytes, bytes]] = []
        self.started = False
        self.status = 500

    def warn_ignored(self, fields: Iterable[str]) -> None:
        self.warning = [(b"warning", f'299 - "ignored: {", ".join(fields)}"'.encode())]

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.started = True
        all_headers = [*headers, *self._ids, *self.warning]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def body(self, body: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, body: bytes, headers: Headers = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [(b"content-type", b"application/json"), length, *headers])
        await self.body(body, more=False)

    async def error(self, error: ApiError) -> None:
        if self.started:
            self.status = error.status
            await self.body(error_event(error), more=False)
            return
        retry = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        await self.whole(error.status, error.body(), retry)


class Reply(Protocol):
    """`add` steps as they come and `push` what can go out; `end` when every answer has its verdict."""

    def add(self, index: int, step: Step) -> None: ...

    async def push(self) -> None: ...

    async def end(self, usage: Usage) -> None: ...


class WholeReply:
    """Keeps everything to the end. `prompt_top`: alternatives per token of the prompt; None: nothing about it."""

    def __init__(
        self,
        sender: Sender,
        shape: Shape,
        vocabulary: Vocabulary,
        asks: list[Ask],
        answers: list[Answer],
        prompt_top: int | None,
    ) -> None:
        self._sender, self._shape, self._vocabulary = sender, shape, vocabulary
        self._asks, self._answers, self._prompt_top = asks, answers, prompt_top
        self._texts: list[list[str]] = [[] for _ in answers]
        self._entries: list[list[Entry]] = [[] for _ in answers]
        self._ids: list[list[int]] = [[] for _ in answers]

    def add(self, index: int, step: Step) -> None:
        self._texts[index].append(step.text)
        self._entries[index].extend(step.entries)
        self._ids[index].extend(step.token_ids)

    async def push(self) -> None:
        pass

    async def end(self, usage: Usage) -> None:
        choices = [self._choice(index) for index in range(len(self._answers))]
        await self._sender.whole(200, self._shape.whole(choices, usage))

    def _choice(self, index: int) -> Choice:
        answer = self._answers[index]
        assert answer.verdict is not None and answer.verdict.finish_reason is not None
        top = self._prompt_top
        ids = self._asks[index].token_ids
        prompt = UNSET if top is None else prompt_logprobs(self._vocabulary, ids, answer.prompt, top)
        return Choice(
            "".join(self._texts[index]),
            self._entries[index],
            answer.verdict.finish_reason,
            prompt,
            self._ids[index],
            len(ids),
            answer.verdict.cached_tokens,
        )


class StreamedReply:
    def __init__(self, sender: Sender, events: Events, answers: list[Answer]) -> None:
        self._sender = sender
        self._events = events
        self._answers = answers
        self._frames = [events.first(len(answers))]

    def add(self, index: int, step: Step) -> None:
        self._frames.append(self._events.step(index, step))

    async def push(self) -> None:
        await self._flush(more=True)

    async def end(self, usage: Usage) -> None:
        self._frames.append(self._events.last(self._answers, usage))
        await self._flush(more=False)

    async def _flush(self, more: bool) -> None:
        if not self._sender.started:
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await self._sender.start(200, [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")])
        frames, self._frames = b"".join(self._frames), []
        if frames:
            await self._sender.body(frames, more)
