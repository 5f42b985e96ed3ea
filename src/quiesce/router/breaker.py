"""Stops giving work to a worker that keeps failing it, and tries it again with one request at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

REMEMBERED = 64  # prompts of one run of failures that are told apart


@dataclass(frozen=True)
class BreakerRules:
    """`failures`: requests in a row, of different prompts, that open it; 0: never. `seconds`: how long it stays open
    before one request may try."""

    failures: int = 5
    seconds: float = 5.0


@dataclass
class Breaker:
    """Of one worker process. Only what is the worker's own fault counts: refusals, a busy worker and a client that
    leaves say nothing about its health, and one prompt that breaks engines counts once."""

    rules: BreakerRules = field(default_factory=BreakerRules)
    opened: int = 0  # times
    _prompts: set[int] = field(default_factory=set)  # of the present run of failures
    _until: float | None = None  # None: closed
    _trial: str | None = None  # the one request that tries, while it is open

    def trouble(self, now: float) -> str | None:
        """Why it gets no request now, or None."""
        if self._until is None:
            return None
        if self._trial is not None:
            return "its last requests failed, and one request is trying it again"
        if now < self._until:
            return f"its last {self.rules.failures} requests failed; it is tried again in {self._until - now:.1f} s"
        return None

    def begin(self, rid: str) -> None:
        """It was given a request."""
        if self._until is not None and self._trial is None:
            self._trial = rid

    def failed(self, rid: str, prompt: int, now: float) -> None:
        """`prompt`: any number that tells prompts apart."""
        if self._trial == rid:
            self._trial, self._until = None, now + self.rules.seconds
            return
        if len(self._prompts) < REMEMBERED:
            self._prompts.add(prompt)
        if self._until is None and 0 < self.rules.failures <= len(self._prompts):
            self._until = now + self.rules.seconds
            self.opened += 1

    def succeeded(self, rid: str) -> None:
        """A request of before it opened says nothing of now."""
        if self._until is None or self._trial == rid:
            self._prompts.clear()
            self._until = self._trial = None

    def over(self, rid: str) -> None:
        """The request is over; a trial that told nothing makes room for the next."""
        if self._trial == rid:
            self._trial = None
