"""Whole answers as JSON, for each endpoint. The document at /openapi.json is written from these structs."""

from __future__ import annotations

import time
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quiesce.api.answer import Answer, Entry, Step
from quiesce.api.detokenize import Vocabulary
from quiesce.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokens,
    chat_logprobs,
    completion_logprobs,
)
from quiesce.api.parse import Wanted
from quiesce.api.toolcalls import Form, Reader, read_whole, reader_for

Reason = Literal["stop", "length", "tool_calls"]
encode = msgspec.json.encode


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON text


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct, frozen=True):
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Choice(msgspec.Struct, frozen=True):
    """One whole answer, not yet in the shape of an endpoint."""

    text: str
    entries: list[Entry]
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptTokens | UnsetType = UNSET
    token_ids: list[int] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Events(Protocol):
    """An answer as server-sent events: the frames of one stream."""

    def first(self, answers: int) -> bytes:
        """What comes before any text."""

    def step(self, index: int, step: Step) -> bytes:
        """A piece of one of its answers; empty when there is nothing to say."""

    def last(self, answers: list[Answer], total: Usage) -> bytes:
        """What follows the end of the last answer."""


class Shape:
    """The JSON around text, for one endpoint and one request."""

    id_prefix: str
    chunk_object: str

    def __init__(self, rid: str, model: str, vocabulary: Vocabulary, wanted: Wanted, form: Form = "hermes") -> None:
        """form: how the model writes tool calls."""
        self.id = f"{self.id_prefix}-{rid}"
        self.created = int(time.time())
        self.model = model
        self._vocabulary = vocabulary
        self._top = wanted.logprobs
        self._wanted = wanted
        self._form = form

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        raise NotImplementedError

    def reader(self) -> Reader:
        """For the tool calls of one answer."""
        return reader_for(self._wanted.tools, self._form)

    def logprobs(self, entries: list[Entry]) -> ChatLogprobs | CompletionLogprobs | None:
        raise NotImplementedError


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, entries: list[Entry]) -> ChatLogprobs | None:
        return None if self._top is None else chat_logprobs(self._vocabulary, entries, self._top)

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [self._choice(i, choice) for i, choice in enumerate(choices)]
        prompt = choices[0].prompt_logprobs
        return encode(
            ChatCompletion(
                id=self.id, created=self.created, model=self.model, choices=made, usage=usage, prompt_logprobs=prompt
            )
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        answer = ChatAnswer(choice.text)
        reason: Reason = choice.finish_reason
        if self._wanted.tools is not None:
            answer = self._with_calls(choice.text)
            if answer.tool_calls and reason == "stop":
                reason = "tool_calls"
        return ChatChoice(index, answer, self.logprobs(choice.entries), reason)

    def _with_calls(self, text: str) -> ChatAnswer:
        content, calls = read_whole(self.reader(), text)
        made = [ToolCall(id, CalledFunction(name, arguments)) for id, name, arguments in calls]
        return ChatAnswer(content or None, made) if made else ChatAnswer(content)


class CompletionShape(Shape):
    id_prefix = "cmpl"
    chunk_object = "text_completion"

    def logprobs(self, entries: list[Entry]) -> CompletionLogprobs | None:
        return None if self._top is None else completion_logprobs(self._vocabulary, entries, self._top)

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [
            TextChoice(
                index=i,
                text=choice.text,
                logprobs=self.logprobs(choice.entries),
                finish_reason=choice.finish_reason,
                prompt_logprobs=choice.prompt_logprobs,
            )
            for i, choice in enumerate(choices)
        ]
        return encode(Completion(id=self.id, created=self.created, model=self.model, choices=made, usage=usage))
