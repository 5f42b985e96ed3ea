"""/tokenize and /detokenize: text to token ids and back, in vLLM's shapes. No worker is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quiesce.api.body import ClientGone
from quiesce.api.errors import invalid
from quiesce.api.generate import Front, check_model
from quiesce.api.messages import check_messages
from quiesce.api.parse import decode
from quiesce.api.schemas import MAX_TEXT, MAX_TOKENS, DetokenizeBody, TokenizeBody

_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenized(msgspec.Struct, frozen=True):
    """`max_model_len` is null while no pair of workers is usable."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Texts:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._detokenized)

    async def _answer(self, request: Request, work: Callable[[bytes], Awaitable[msgspec.Struct]]) -> Response:
        try:
            raw = await self._front.bodies.read(request.receive, dict(request.headers.raw))
        except ClientGone:
            return Response(status_code=499)
        made = await work(raw)
        return Response(msgspec.json.encode(made), media_type="application/json")

    async def _tokenized(self, raw: bytes) -> Tokenized:
        body = await self._front.text.parsed(lambda raw: decode(_tokenize, raw), raw)
        self._check_model(body.model)
        ids = await self._ids(body)
        shown = self._front.text.vocabulary.shown
        strings = [shown(id)[0] for id in ids] if body.return_token_strs else UNSET
        return Tokenized(len(ids), self._front.backend.context_limit(), ids, strings)

    async def _ids(self, body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "either prompt or messages must be given, and not both")
        if body.prompt is not None:
            _within("prompt", len(body.prompt), MAX_TEXT, "characters")
            return await self._front.text.encode_text(body.prompt, body.add_special_tokens)
        messages = check_messages(body.messages or [])
        _within("messages", sum(len(message["content"]) for message in messages), MAX_TEXT, "characters")
        return await self._front.text.encode_chat(messages, body.add_generation_prompt)

    async def _detokenized(self, raw: bytes) -> Detokenized:
        body = await self._front.text.parsed(lambda raw: decode(_detokenize, raw), raw)
        self._check_model(body.model)
        _within("tokens", len(body.tokens), MAX_TOKENS, "token ids")
        return Detokenized(await self._front.text.decode(body.tokens))

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            check_model(model, self._front.model)


def _within(param: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise invalid(param, f"at most {limit} {what} are allowed, got {size}")
