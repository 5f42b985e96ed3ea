"""Running answers: what has arrived of each and nobody has fetched yet."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from quiesce.api.backend import Ask, Delivery, Verdict
from quiesce.core.messages import TokenLogprob
from quiesce.router import request as rq
from quiesce.router.registry import Worker

Feed = Callable[["Call", rq.Event], None]


class Call:
    """One answer: its tokens, and the attempt at it that runs now with its machine, its workers and its names."""

    lone = False  # one leg, paired by somebody else

    def __init__(self, work: Work, index: int, ask: Ask, workers: dict[rq.Side, Worker]) -> None:
        self.work = work
        self.index = index
        self.ask = ask
        self.began = 0.0  # of the event loop's clock
        self.attempts = 0
        self.emitted: list[int] = []  # every token of the answer so far
        self.pending: Verdict | None = None  # a failure that the next attempt may make good
        self.failed_at: set[int] = set()  # epochs that are to blame for failed attempts
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: list[TokenLogprob | None] = []
        self._verdict: Verdict | None = None
        self.attempt(workers)

    def prefill_of(self, side: rq.Side) -> Worker | None:
        """Whom a leg of this side gets its prompt's pages from."""
        return self.workers.get("prefill") if side == "decode" else None

    def attempt(self, workers: dict[rq.Side, Worker]) -> None:
        """Starts anew with a pairing id and a request id that no worker has seen."""
        self.workers = workers
        self.pending = None
        self.attempts += 1
        self.rid = self.ask.rid if self.attempts == 1 else f"{self.ask.rid}.{self.attempts}"
        self.room = secrets.randbits(63)
        sides: tuple[rq.Side, ...] = ("decode", "prefill") if "prefill" in workers else ("decode",)
        sampling = self.ask.sampling
        prompt = 0 if sampling.prompt_logprobs is None or self.emitted else len(self.ask.token_ids)
        self._prompt = [] if prompt else self._prompt
        self.machine = rq.RequestMachine(sides, sampling.logprobs is not None, prompt)

    @property
    def over(self) -> bool:
        """Its client has been given the verdict."""
        return self._verdict is not None

    @property
    def ready(self) -> bool:
        """There is something to fetch. Tokens wait for the prompt's log-probabilities, which come before them."""
        return self.over or (bool(self._tokens) and not self.machine.prompt_missing)

    def take(self) -> Delivery:
        taken = Delivery(self.index, self._tokens, self._logprobs, self._prompt, self._verdict)
        self._tokens, self._logprobs, self._prompt = [], [], []
        return taken

    def emit(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        self.emitted.extend(token_ids)
        self._tokens.extend(token_ids)
        self._logprobs.extend(logprobs)
        self.work.changed(self)

    def emit_prompt(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        self._prompt.extend(logprobs)
        self.work.changed(self)

    def finish(self, verdict: Verdict) -> None:
        if self.attempts > 1:  # the tokens of a continued answer may be cached too, and are no prompt
            cached = min(verdict.cached_tokens, len(self.ask.token_ids))
            verdict = Verdict(verdict.finish_reason, verdict.error, cached)
        self._verdict = verdict
        self.pending = None
        self.work.changed(self)


class Work:
    """The answers of one client request. The first that fails ends the others."""

    def __init__(self, feed: Feed) -> None:
        self.calls: list[Call] = []
        self._feed = feed
        self._changed: dict[int, Call] = {}  # by index, in order of arrival
        self._wake: asyncio.Future[None] | None = None

    async def next(self) -> list[Delivery]:
        while not self._changed:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        changed, self._changed = self._changed, {}
        return [call.take() for call in changed.values()]

    def changed(self, call: Call) -> None:
        if call.ready:
            self._changed[call.index] = call
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    def failed(self, call: Call, verdict: Verdict) -> None:
        """Ends the others with the error of the one that failed first."""
        error = verdict.error
        if error is None:
            return
        for other in self.calls:
            if other is not call and not other.over:
                self._feed(other, rq.GaveUp(error.status, error.message, error.code or ""))

    def satisfied(self, index: int) -> None:
        self._feed(self.calls[index], rq.Satisfied())

    def abandon(self, reason: str) -> None:
        for call in self.calls:
            if not call.over:
                self._feed(call, rq.GaveUp(499, reason, "client_gone"))
