"""Answers as server-sent events, as chat and completions have them. Everything but the text is serialised once."""

from __future__ import annotations

from typing import Any

from quiesce.api.answer import Answer, Entry, Step
from quiesce.api.errors import ApiError
from quiesce.api.parse import Wanted
from quiesce.api.shapes import ChatShape, Reason, Shape, Usage, encode, usage
from quiesce.api.toolcalls import Arguments, Call, Piece, Reader, Text


class TextEvents:
    """`index` says which of the stream's answers a frame is about."""

    def __init__(self, shape: Shape, include_usage: bool, continuous: bool = False) -> None:
        """continuous: each frame has the usage of its answer so far."""
        self._shape = shape
        self._chat = isinstance(shape, ChatShape)
        self._include_usage = include_usage
        self._continuous = continuous
        self._counts: dict[int, tuple[int, int]] = {}  # answer -> tokens of its prompt, tokens so far
        head = {"id": shape.id, "object": shape.chunk_object, "created": shape.created, "model": shape.model}
        self._open = b"data: " + encode(head)[:-1] + b',"choices":['
        self._usage = b',"usage":null' if include_usage else b""
        self._delta = b',"delta":{"content":' if self._chat else b',"text":'
        self._logprobs = (b"}" if self._chat else b"") + b',"logprobs":'

    def _close(self, index: int) -> bytes:
        used = self._usage
        if self._continuous:
            used = b',"usage":' + encode(usage(*self._counts.get(index, (0, 0)), 0))
        return b"]" + used + b"}\n\n"

    def _end(self, index: int) -> bytes:
        return b',"finish_reason":null}' + self._close(index)

    def first(self, answers: int) -> bytes:
        """What comes before any text: the role of each answer, in a chat."""
        if not self._chat:
            return b""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null'
        return b"".join(self._open + b'{"index":%d' % at + role + self._end(at) for at in range(answers))

    def _count(self, index: int, step: Step) -> None:
        if self._continuous:
            before = self._counts.get(index, (0, 0))[1]
            self._counts[index] = (step.prompt_tokens, before + len(step.token_ids))

    def step(self, index: int, step: Step) -> bytes:
        self._count(index, step)
        said = self.text(index, step.text, step.entries)
        return said if step.verdict is None else said + self.finish(index, step.verdict.finish_reason)

    def text(self, index: int, text: str, entries: list[Entry]) -> bytes:
        """Empty when there is nothing to say. A token whose text is not certain yet has its log-probability now."""
        if not text and not entries:
            return b""
        start = self._open + b'{"index":%d' % index + self._delta
        return start + encode(text) + self._logprobs + self._encoded(entries) + self._end(index)

    def _encoded(self, entries: list[Entry]) -> bytes:
        return encode(self._shape.logprobs(entries)) if entries else b"null"

    def finish(self, index: int, reason: Reason | None) -> bytes:
        payload = b',"delta":{}' if self._chat else b',"text":""'
        end = b',"logprobs":null,"finish_reason":' + encode(reason) + b"}"
        return self._open + b'{"index":%d' % index + payload + end + self._close(index)

    def last(self, answers: list[Answer], total: Usage) -> bytes:
        """The usage when it was asked for, and the normal terminator."""
        used = self._open + b'],"usage":' + encode(total) + b"}\n\n" if self._include_usage else b""
        return used + b"data: [DONE]\n\n"


class ToolEvents(TextEvents):
    """A chat that may call tools: calls are deltas of their own. Log-probabilities ride on a frame of text."""

    def __init__(self, shape: Shape, include_usage: bool, continuous: bool = False) -> None:
        super().__init__(shape, include_usage, continuous)
        self._readers: dict[int, Reader] = {}

    def step(self, index: int, step: Step) -> bytes:
        self._count(index, step)
        reader = self._readers.setdefault(index, self._shape.reader())
        pieces = reader.push(step.text)
        if step.verdict is not None:
            pieces += reader.finish()
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        calls = b"".join(self._call(index, piece) for piece in pieces if not isinstance(piece, Text))
        said = self.text(index, text, step.entries) + calls
        if step.verdict is None:
            return said
        reason: Reason | None = step.verdict.finish_reason
        return said + self.finish(index, "tool_calls" if reader.calls and reason == "stop" else reason)

    def _call(self, index: int, piece: Piece) -> bytes:
        delta: dict[str, Any] = {}
        match piece:
            case Call(number, id, name):
                delta = {"index": number, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case Arguments(number, text):
                delta = {"index": number, "function": {"arguments": text}}
        payload = b',"delta":{"tool_calls":[' + encode(delta) + b']},"logprobs":null'
        return self._open + b'{"index":%d' % index + payload + self._end(index)


def error_event(error: ApiError) -> bytes:
    """The end of a stream that failed: no terminator follows, so nobody takes it for a whole answer."""
    return b"data: " + error.body() + b"\n\n"


def text_events(shape: Shape, wanted: Wanted) -> TextEvents:
    kind = TextEvents if wanted.tools is None else ToolEvents
    return kind(shape, wanted.include_usage, wanted.continuous_usage)
