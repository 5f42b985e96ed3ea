"""Answers as server-sent events. Everything but the text is serialised once."""

from __future__ import annotations

from quiesce.api.answer import Entry
from quiesce.api.errors import ApiError
from quiesce.api.shapes import ChatShape, Reason, Shape, Usage, encode


class Events:
    """The frames of one stream; `index` says which of its answers a frame is about."""

    def __init__(self, shape: Shape, include_usage: bool) -> None:
        self._shape = shape
        self._chat = isinstance(shape, ChatShape)
        self._include_usage = include_usage
        head = {"id": shape.id, "object": shape.chunk_object, "created": shape.created, "model": shape.model}
        self._open = b"data: " + encode(head)[:-1] + b',"choices":['
        usage = b',"usage":null' if include_usage else b""
        self._close = b"]" + usage + b"}\n\n"
        self._delta = b',"delta":{"content":' if self._chat else b',"text":'
        self._logprobs = (b"}" if self._chat else b"") + b',"logprobs":'
        self._end = b',"finish_reason":null}' + self._close

    def first(self, answers: int) -> bytes:
        """What comes before any text: the role of each answer, in a chat."""
        if not self._chat:
            return b""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null'
        return b"".join(self._open + b'{"index":%d' % index + role + self._end for index in range(answers))

    def text(self, index: int, text: str, entries: list[Entry]) -> bytes:
        """Empty when there is nothing to say. A token whose text is not certain yet has its log-probability now."""
        if not text and not entries:
            return b""
        logprobs = encode(self._shape.logprobs(entries)) if entries else b"null"
        start = self._open + b'{"index":%d' % index + self._delta
        return start + encode(text) + self._logprobs + logprobs + self._end

    def finish(self, index: int, reason: Reason | None) -> bytes:
        payload = b',"delta":{}' if self._chat else b',"text":""'
        end = b',"logprobs":null,"finish_reason":' + encode(reason) + b"}"
        return self._open + b'{"index":%d' % index + payload + end + self._close

    def last(self, usage: Usage) -> bytes:
        """The usage when it was asked for, and the normal terminator."""
        total = self._open + b'],"usage":' + encode(usage) + b"}\n\n" if self._include_usage else b""
        return total + b"data: [DONE]\n\n"

    @staticmethod
    def error(error: ApiError) -> bytes:
        """The end of a stream that failed: no terminator follows, so nobody takes it for a whole answer."""
        return b"data: " + error.body() + b"\n\n"
