"""One request as the router sees it: two legs (or one), one verdict. No I/O, no clock.

`machine.on(event)` returns actions. Rules: the first cause wins; there is exactly one `Finish`; whoever ends the
request cancels every leg that is still open (guards R1-R3); a leg is forgotten only when its worker said the
last word, is dead, or stayed silent to repeated cancels. What the pages do meanwhile is the workers' business (R4).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from quiesce.api.backend import Verdict
from quiesce.api.errors import ApiError
from quiesce.core.messages import Ended

Side = Literal["decode", "prefill"]  # a colocated worker serves as the decode side of a request without prefill
CANCEL_TRIES = 6


class LegState(Enum):
    NEW = auto()  # nothing sent
    OPEN = auto()  # Start sent
    ENDING = auto()  # no longer needed; its last word has not come
    CLOSED = auto()


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    pass


@dataclass(frozen=True)
class Sent:
    side: Side


@dataclass(frozen=True)
class NotSent:
    side: Side
    worker: str


@dataclass(frozen=True)
class LegTokens:
    side: Side
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class LegEnded:
    side: Side
    ended: Ended


@dataclass(frozen=True)
class LegLost:
    """Its worker cannot be heard. `dead`: nor will it ever be again; otherwise it may still run the leg."""

    side: Side
    reason: str
    dead: bool


@dataclass(frozen=True)
class LegSilent:
    """Its worker misses heartbeats: enough to give up waiting for a first token, too little to cut an answer."""

    side: Side
    reason: str


@dataclass(frozen=True)
class GaveUp:
    """Nobody waits for the answer any more: client gone, deadline, shutdown."""

    status: int
    reason: str
    code: str


@dataclass(frozen=True)
class Satisfied:
    """A stop string was found: the answer is whole."""


@dataclass(frozen=True)
class Fired:
    side: Side


Event = Begin | Sent | NotSent | LegTokens | LegEnded | LegLost | LegSilent | GaveUp | Satisfied | Fired

# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class SendStart:
    """Answer with Sent or NotSent before anything else."""

    side: Side


@dataclass(frozen=True)
class SendCancel:
    side: Side
    reason: str


@dataclass(frozen=True)
class Arm:
    """Answer with Fired after a while; each try waits longer."""

    side: Side
    tries: int


@dataclass(frozen=True)
class Emit:
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    verdict: Verdict


@dataclass(frozen=True)
class LegClosed:
    """The leg no longer counts against its worker. `answered`: False when its worker was given up on."""

    side: Side
    answered: bool = True


@dataclass(frozen=True)
class Forget:
    """All legs are closed and the verdict was given."""


Action = SendStart | SendCancel | Arm | Emit | Finish | LegClosed | Forget


class RequestMachine:
    """`late` counts events that came too late to matter; they change nothing."""

    def __init__(self, sides: tuple[Side, ...] = ("decode", "prefill")) -> None:
        self.legs: dict[Side, LegState] = dict.fromkeys(sides, LegState.NEW)
        self.verdict: Verdict | None = None
        self.tokens = 0  # received from the decode side
        self.late = 0
        self._cached = 0
        self._why = ""
        self._tries: dict[Side, int] = dict.fromkeys(sides, 0)

    @property
    def closed(self) -> bool:
        return self.verdict is not None and all(state is LegState.CLOSED for state in self.legs.values())

    def on(self, event: Event) -> list[Action]:
        if self.closed:
            self.late += 1
            return []
        actions = self._on(event)
        if self.closed:
            actions.append(Forget())
        return actions

    def _on(self, event: Event) -> list[Action]:
        match event:
            case Begin():
                return [SendStart("decode")]  # it lends the pages, so it should know first
            case Sent(side):
                self.legs[side] = LegState.OPEN
                return [SendStart("prefill")] if side == "decode" and "prefill" in self.legs else []
            case NotSent(side, worker):
                self.legs[side] = LegState.CLOSED
                text = f"worker {worker} could not be reached; the request was not started there"
                return [LegClosed(side), *self._fail(503, text, "worker_unreachable")]
            case LegTokens(side, token_ids):
                return self._tokens(side, token_ids)
            case LegEnded(side, ended):
                return self._ended(side, ended)
            case LegLost(side, reason, dead):
                return self._lost(side, reason, dead)
            case LegSilent(side, reason):
                waiting = self.verdict is None and self.tokens == 0 and self.legs[side] is LegState.OPEN
                return self._fail(502, reason, "worker_lost") if waiting else []
            case GaveUp(status, reason, code):
                return self._fail(status, reason, code)
            case Satisfied():
                return self._finish(Verdict("stop", None, self._cached), "the answer is complete")
            case Fired(side):
                return self._fired(side)

    def _tokens(self, side: Side, token_ids: tuple[int, ...]) -> list[Action]:
        if self.verdict is not None or side != "decode" or self.legs[side] is not LegState.OPEN:
            self.late += 1
            return []
        self.tokens += len(token_ids)
        return [Emit(token_ids)]

    def _ended(self, side: Side, ended: Ended) -> list[Action]:
        if self.legs[side] is LegState.CLOSED:
            self.late += 1
            return []
        self.legs[side] = LegState.CLOSED
        closed: list[Action] = [LegClosed(side)]
        self._cached = max(self._cached, ended.cached_tokens)
        if self.verdict is not None:
            return closed
        if side == "prefill":
            # The first token travels with the hand-off: tokens from decode mean that it has happened.
            if ended.outcome == "handed_over" or self.tokens:
                return closed
            return closed + self._failed_leg(side, ended)
        if ended.outcome not in ("stop", "length"):
            return closed + self._failed_leg(side, ended)
        if ended.completion_tokens != self.tokens:
            text = f"tokens were lost between worker and router: {self.tokens} of {ended.completion_tokens} arrived"
            return closed + self._fail(500, text, "tokens_lost")
        reason: Literal["stop", "length"] = "stop" if ended.outcome == "stop" else "length"
        return closed + self._finish(Verdict(reason, None, self._cached), "the answer is complete")

    def _failed_leg(self, side: Side, ended: Ended) -> list[Action]:
        status = ended.status if 400 <= ended.status <= 599 else 500
        text = f"the {side} worker {ended.outcome} the request"
        return self._fail(status, f"{text}: {ended.reason}" if ended.reason else text, f"{side}_{ended.outcome}")

    def _lost(self, side: Side, reason: str, dead: bool) -> list[Action]:
        if self.legs[side] is LegState.CLOSED:
            return []
        closed: list[Action] = []
        if dead:
            self.legs[side] = LegState.CLOSED
            closed = [LegClosed(side)]
        if self.verdict is not None or (side == "prefill" and self.tokens):
            return closed
        return closed + self._fail(502, reason, "worker_lost")

    def _fail(self, status: int, text: str, code: str) -> list[Action]:
        retry = 1 if status == 503 else None
        return self._finish(Verdict(error=ApiError(status, text, code=code, retry_after=retry)), text)

    def _finish(self, verdict: Verdict, why: str) -> list[Action]:
        """The first cause wins: gives the verdict and ends whatever still runs."""
        if self.verdict is not None:
            self.late += 1
            return []
        self.verdict = verdict
        self._why = why
        actions: list[Action] = [Finish(verdict)]
        for side, state in self.legs.items():
            if state is LegState.NEW:
                self.legs[side] = LegState.CLOSED
                actions.append(LegClosed(side))
            elif state is LegState.OPEN:
                self.legs[side] = LegState.ENDING
                # Decode has the whole answer, so prefill has handed over and its last word is on the way.
                if not (side == "prefill" and verdict.error is None):
                    actions.append(SendCancel(side, why))
                actions.append(Arm(side, 0))
        return actions

    def _fired(self, side: Side) -> list[Action]:
        """No last word yet: the cancel, or the answer to it, may be lost."""
        if self.legs[side] is not LegState.ENDING:
            return []
        self._tries[side] += 1
        if self._tries[side] >= CANCEL_TRIES:
            self.legs[side] = LegState.CLOSED
            return [LegClosed(side, answered=False)]
        return [SendCancel(side, self._why), Arm(side, self._tries[side])]
