"""One request as the router sees it: two legs (or one), one verdict. No I/O, no clock.

`machine.on(event)` returns actions. Rules: the first cause wins; there is exactly one `Finish`; whoever ends the
request cancels every leg that is still open (guards R1-R3); a leg is forgotten only when its worker said the
last word, is dead, or stayed silent to repeated cancels. Log-probabilities that were asked for are part of the
answer: without them it has failed. What the pages do meanwhile is the workers' business (R4).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from quiesce.api.backend import Verdict
from quiesce.api.errors import ApiError
from quiesce.core.messages import Ended, TokenLogprob

Side = Literal["decode", "prefill"]  # a colocated worker serves as the decode side of a request without prefill
CANCEL_TRIES = 6
DONE = ("stop", "length")
AGAIN = (502, 503)  # a hand-off that failed, a worker that is full or leaves: not an engine that broke on the prompt


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
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class LegPrompt:
    """Log-probabilities of the prompt's tokens from position `first` on."""

    side: Side
    first: int
    logprobs: tuple[TokenLogprob | None, ...]


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
class GaveUp:
    """Nobody waits for the answer any more: client gone, deadline, shutdown. `late`: the workers had all the time
    that a request may take."""

    status: int
    reason: str
    code: str
    late: bool = False


@dataclass(frozen=True)
class Satisfied:
    """A stop string was found: the answer is whole."""


@dataclass(frozen=True)
class Fired:
    side: Side


Event = Begin | Sent | NotSent | LegTokens | LegPrompt | LegEnded | LegLost | GaveUp | Satisfied | Fired

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
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class EmitPrompt:
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True)
class Finish:
    """`again`: it failed for a reason that another attempt need not meet."""

    verdict: Verdict
    again: bool = False


@dataclass(frozen=True)
class Blame:
    """The failure came from this side's worker, so another attempt goes elsewhere. `sick`: it is not well."""

    side: Side
    sick: bool = True


@dataclass(frozen=True)
class Credit:
    """This side's worker did what it was asked for."""

    side: Side


@dataclass(frozen=True)
class LegClosed:
    """The leg no longer counts against its worker. `answered`: False when its worker was given up on."""

    side: Side
    answered: bool = True


@dataclass(frozen=True)
class Forget:
    """All legs are closed and the verdict was given."""


Action = SendStart | SendCancel | Arm | Emit | EmitPrompt | Finish | Blame | Credit | LegClosed | Forget


class RequestMachine:
    """`late` counts events that came too late to matter; they change nothing."""

    def __init__(
        self, sides: tuple[Side, ...] = ("decode", "prefill"), logprobs: bool = False, prompt_logprobs: int = 0
    ) -> None:
        """logprobs: every token must come with one. prompt_logprobs: how many of the prompt must come."""
        self.legs: dict[Side, LegState] = dict.fromkeys(sides, LegState.NEW)
        self.verdict: Verdict | None = None
        self.tokens = 0  # received from the decode side
        self.late = 0
        self.prompt_missing = prompt_logprobs
        self._prompt_seen = 0
        self._logprobs = logprobs
        self._complete: Verdict | None = None  # decode is through, the prompt's log-probabilities are on their way
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
                return [Blame(side), LegClosed(side), *self._fail(503, text, "worker_unreachable", again=True)]
            case LegTokens():
                return self._tokens(event)
            case LegPrompt():
                return self._prompt(event)
            case LegEnded(side, ended):
                return self._ended(side, ended)
            case LegLost(side, reason, dead):
                return self._lost(side, reason, dead)
            case GaveUp(status, reason, code, late):
                slow: list[Action] = [Blame(self._at())] if late and self.verdict is None else []
                return [*slow, *self._fail(status, reason, code)]
            case Satisfied():
                return self._finish(Verdict("stop", None, self._cached), "the answer is complete")
            case Fired(side):
                return self._fired(side)

    def _at(self) -> Side:
        """Where the request is: with prefill until the first token has come."""
        return "prefill" if not self.tokens and self.legs.get("prefill") is LegState.OPEN else "decode"

    def _tokens(self, event: LegTokens) -> list[Action]:
        if self.verdict is not None or event.side != "decode" or self.legs["decode"] is not LegState.OPEN:
            self.late += 1
            return []
        if self._logprobs and len(event.logprobs) != len(event.token_ids):
            text = f"{len(event.token_ids)} tokens came with {len(event.logprobs)} log-probabilities"
            return self._fail(500, text, "logprobs_lost")
        self.tokens += len(event.token_ids)
        return [Emit(event.token_ids, event.logprobs if self._logprobs else ())]

    def _prompt(self, event: LegPrompt) -> list[Action]:
        """They come from the side that computes the prompt, in order."""
        computes = "prefill" if "prefill" in self.legs else "decode"
        if self.verdict is not None or event.side != computes or not self.prompt_missing:
            self.late += 1
            return []
        if event.first != self._prompt_seen or len(event.logprobs) > self.prompt_missing:
            text = f"log-probabilities of the prompt from {event.first} on came after {self._prompt_seen} of them"
            return self._fail(500, text, "logprobs_lost")
        self._prompt_seen += len(event.logprobs)
        self.prompt_missing -= len(event.logprobs)
        said: list[Action] = [EmitPrompt(event.logprobs)]
        if self._complete is not None and not self.prompt_missing:
            said += self._finish(self._complete, "the answer is complete")
        return said

    def _ended(self, side: Side, ended: Ended) -> list[Action]:
        if self.legs[side] is LegState.CLOSED:
            self.late += 1
            return []
        self.legs[side] = LegState.CLOSED
        self._cached = max(self._cached, ended.cached_tokens)
        closed: list[Action] = [*self._judged(side, ended), LegClosed(side)]
        if self.verdict is not None:
            return closed
        if side == "prefill":
            if ended.outcome == "handed_over" and self.prompt_missing:
                text = f"{self.prompt_missing} log-probabilities of the prompt were lost between worker and router"
                return closed + self._fail(500, text, "logprobs_lost")
            # The first token travels with the hand-off: tokens from decode mean that it has happened.
            if not self.prompt_missing and (ended.outcome == "handed_over" or self.tokens):
                return closed
            return closed + self._failed_leg(side, ended)
        if ended.outcome not in DONE:
            return closed + self._failed_leg(side, ended)
        if ended.completion_tokens != self.tokens:
            text = f"tokens were lost between worker and router: {self.tokens} of {ended.completion_tokens} arrived"
            return closed + self._fail(500, text, "tokens_lost")
        reason: Literal["stop", "length"] = "stop" if ended.outcome == "stop" else "length"
        return closed + self._whole(Verdict(reason, None, self._cached))

    def _judged(self, side: Side, ended: Ended) -> list[Action]:
        """What a last word says of workers. The first failure alone counts, and a client's mistake does not."""
        if ended.outcome in DONE or ended.outcome == "handed_over":
            return [Credit(side)]
        handed_over = side == "prefill" and self.tokens and not self.prompt_missing
        if self.verdict is not None or handed_over or ended.outcome == "cancelled" or ended.fault == "router":
            return []  # it ended because of the other leg, or because this router was late with that
        other: Side = "prefill" if side == "decode" else "decode"
        if ended.fault == "peer":  # a decode leg may end because of its prefill worker
            return [Blame(other, sick=ended.status != 503)] if other in self.legs else []  # full is not sick
        return [Blame(side, sick=ended.fault == "self" or ended.status == 500)]

    def _whole(self, verdict: Verdict) -> list[Action]:
        if not self.prompt_missing:
            return self._finish(verdict, "the answer is complete")
        if self.legs.get("prefill") is LegState.OPEN:
            self._complete = verdict
            return []
        return self._fail(500, f"{self.prompt_missing} log-probabilities of the prompt did not come", "logprobs_lost")

    def _failed_leg(self, side: Side, ended: Ended) -> list[Action]:
        status = ended.status if 400 <= ended.status <= 599 else 500
        text = f"the {side} worker {ended.outcome} the request"
        said = f"{text}: {ended.reason}" if ended.reason else text
        return self._fail(status, said, f"{side}_{ended.outcome}", again=status in AGAIN)

    def _lost(self, side: Side, reason: str, dead: bool) -> list[Action]:
        if self.legs[side] is LegState.CLOSED:
            return []
        closed: list[Action] = []
        if dead:
            self.legs[side] = LegState.CLOSED
            closed = [LegClosed(side)]
        if self.verdict is not None or (side == "prefill" and self.tokens and not self.prompt_missing):
            return closed
        return [Blame(side), *closed, *self._fail(502, reason, "worker_lost", again=True)]

    def _fail(self, status: int, text: str, code: str, again: bool = False) -> list[Action]:
        retry = 1 if status == 503 else None
        return self._finish(Verdict(error=ApiError(status, text, code=code, retry_after=retry)), text, again)

    def _finish(self, verdict: Verdict, why: str, again: bool = False) -> list[Action]:
        """The first cause wins: gives the verdict and ends whatever still runs."""
        if self.verdict is not None:
            self.late += 1
            return []
        self.verdict = verdict
        self._why = why
        actions: list[Action] = [Finish(verdict, again)]
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
