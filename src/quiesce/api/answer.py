"""One answer on its way out: tokens become text and log-probabilities, a few at a time."""

from __future__ import annotations

import msgspec

from quiesce.api.backend import Delivery, Verdict
from quiesce.api.detokenize import TextStream
from quiesce.core.messages import TokenLogprob


class Entry(msgspec.Struct, frozen=True):
    """A token with its log-probability. None: it has none, being the first of the prompt."""

    token: int
    logprob: TokenLogprob | None
    offset: int  # characters of the choice's text before it


class Echo(msgspec.Struct, frozen=True):
    """The prompt, when the answer is to begin with it."""

    token_ids: tuple[int, ...]
    text: str
    offsets: list[int]


class Step(msgspec.Struct, frozen=True):
    """A piece of the answer; `verdict` is set on the last one."""

    text: str
    entries: list[Entry]
    verdict: Verdict | None = None
    token_ids: list[int] = []  # those that count
    prompt_tokens: int = 0


class Answer:
    """`take` each delivery; when `stopped`, its work may be ended and one more delivery brings the verdict."""

    def __init__(
        self,
        text: TextStream,
        logprobs: bool = False,
        echo: Echo | None = None,
        only_echo: bool = False,
        prompt_tokens: int = 0,
    ) -> None:
        """only_echo: the answer proper (one token, as no fewer can be asked for) is left out."""
        self._text = text
        self._logprobs = logprobs
        self._echo = echo
        self._base = len(echo.text) if echo else 0
        self._only_echo = only_echo
        self._prompt_tokens = prompt_tokens
        self.prompt: list[TokenLogprob | None] = []
        self.verdict: Verdict | None = None

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def counted(self) -> int:
        return 0 if self._only_echo else self._text.counted

    def take(self, delivery: Delivery) -> Step:
        """The text that has become certain; it may be empty."""
        if delivery.prompt:
            self.prompt = delivery.prompt
        verdict = delivery.verdict
        stopped, before = self.stopped, self._text.counted
        piece = self._text.push(delivery.token_ids)
        entries = self._entries(delivery, before) if self._logprobs and not stopped else []
        if verdict is not None and verdict.error is None:
            piece += self._text.flush()
        if self.stopped and verdict is not None:  # the answer is whole, whatever has happened to the work since
            verdict = Verdict("stop", None, verdict.cached_tokens)
        if self._only_echo:
            piece, entries = "", []
            verdict = Verdict("length", None, verdict.cached_tokens) if verdict and not verdict.error else verdict
        self.verdict = verdict
        if self._echo is not None and (verdict is None or verdict.error is None):
            piece, entries = self._echo.text + piece, self._echoed() + entries
            self._echo = None
        ids = [] if self._only_echo else delivery.token_ids[: self._text.counted - before]
        return Step(piece, entries, verdict, ids, self._prompt_tokens)

    def _entries(self, delivery: Delivery, before: int) -> list[Entry]:
        """For the tokens that count: none for those behind a stop string."""
        offsets = self._text.offsets[before:]
        tokens = zip(delivery.token_ids, delivery.logprobs, strict=True)
        return [Entry(id, found, self._base + at) for (id, found), at in zip(tokens, offsets, strict=False)]

    def _echoed(self) -> list[Entry]:
        if self._echo is None or not self._logprobs:
            return []
        return [
            Entry(id, found, at)
            for id, found, at in zip(self._echo.token_ids, self.prompt, self._echo.offsets, strict=True)
        ]
