"""One answer on its way out: tokens become text, text becomes JSON or server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from quiesce.api.backend import Call, Verdict
from quiesce.api.detokenize import TextStream
from quiesce.api.errors import ApiError

encode = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Step(msgspec.Struct, frozen=True):
    """A piece of the answer; `verdict` is set on the last one."""

    text: str
    verdict: Verdict | None = None


async def steps(call: Call, text: TextStream) -> AsyncGenerator[Step]:
    """Yields at every arrival of tokens, with the text that has become certain (it may be empty)."""
    while True:
        delivery = await call.next()
        piece = text.push(delivery.token_ids)
        verdict = delivery.verdict
        if text.stopped:  # the answer is whole, whatever has happened to the work since
            call.satisfied()
            while verdict is None:
                verdict = (await call.next()).verdict
            yield Step(piece, Verdict("stop", None, verdict.cached_tokens))
            return
        if verdict is None:
            yield Step(piece)
            continue
        if verdict.error is None:
            piece += text.flush()
            if text.stopped:
                verdict = Verdict("stop", None, verdict.cached_tokens)
        yield Step(piece, verdict)
        return


class Shape:
    """The JSON around the text, for one endpoint and one answer."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, rid: str, model: str) -> None:
        self._head = {"id": f"{self.id_prefix}-{rid}", "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str | None, usage: Usage) -> bytes:
        choice = self._choice(text) | {"index": 0, "logprobs": None, "finish_reason": reason}
        return encode(self._head | {"object": self.whole_object, "choices": [choice], "usage": usage.body()})

    def _choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionShape(Shape):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}


class Events:
    """Server-sent events of one streamed answer. Everything but the text is serialised once."""

    def __init__(self, shape: Shape, include_usage: bool) -> None:
        self._chat = isinstance(shape, ChatShape)
        self._include_usage = include_usage
        head = encode(shape._head | {"object": shape.chunk_object})[:-1]
        self._open = b"data: " + head + b',"choices":['
        usage = b',"usage":null' if include_usage else b""
        self._close = b"]" + usage + b"}\n\n"
        delta = b'"delta":{"content":' if self._chat else b'"text":'
        end = b"}" if self._chat else b""
        self._before = self._open + b'{"index":0,' + delta
        self._after = end + b',"logprobs":null,"finish_reason":null}' + self._close

    def first(self) -> bytes:
        if not self._chat:
            return b""
        role = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._open + role + self._close

    def text(self, text: str) -> bytes:
        return self._before + encode(text) + self._after if text else b""

    def last(self, reason: str | None, usage: Usage) -> bytes:
        """The finish reason, the usage when it was asked for, and the normal terminator."""
        payload = b'"delta":{}' if self._chat else b'"text":""'
        end = b'{"index":0,' + payload + b',"logprobs":null,"finish_reason":' + encode(reason) + b"}"
        total = self._open + b'],"usage":' + encode(usage.body()) + b"}\n\n" if self._include_usage else b""
        return self._open + end + self._close + total + b"data: [DONE]\n\n"

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The end of a stream that failed: no terminator follows, so nobody takes it for a whole answer."""
        return b"data: " + error.body() + b"\n\n"
