"""Whole answers as JSON, for each endpoint. The document at /openapi.json is written from these structs."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quiesce.api.answer import Entry
from quiesce.api.detokenize import Vocabulary
from quiesce.api.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptTokens,
    chat_logprobs,
    completion_logprobs,
)

Reason = Literal["stop", "length"]
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


class ChatAnswer(msgspec.Struct, frozen=True):
    content: str
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
    finish_reason: Reason
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class Shape:
    """The JSON around text, for one endpoint and one request. `top`: alternatives per token; None: no logprobs."""

    id_prefix: str
    chunk_object: str

    def __init__(self, rid: str, model: str, vocabulary: Vocabulary, top: int | None) -> None:
        self.id = f"{self.id_prefix}-{rid}"
        self.created = int(time.time())
        self.model = model
        self._vocabulary = vocabulary
        self._top = top

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        raise NotImplementedError

    def logprobs(self, entries: list[Entry]) -> ChatLogprobs | CompletionLogprobs | None:
        raise NotImplementedError


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, entries: list[Entry]) -> ChatLogprobs | None:
        return None if self._top is None else chat_logprobs(self._vocabulary, entries, self._top)

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        made = [
            ChatChoice(i, ChatAnswer(choice.text), self.logprobs(choice.entries), choice.finish_reason)
            for i, choice in enumerate(choices)
        ]
        prompt = choices[0].prompt_logprobs
        return encode(
            ChatCompletion(
                id=self.id, created=self.created, model=self.model, choices=made, usage=usage, prompt_logprobs=prompt
            )
        )


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
