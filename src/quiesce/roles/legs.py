"""The router's side of a worker: legs that are under way, and what is still to be told about them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from quiesce.core.holding import ACCESS_REVOKED
from quiesce.core.lending import PEER_FULL
from quiesce.core.messages import (
    Control,
    Drawn,
    Ended,
    PromptLogprobs,
    Start,
    TokenLogprob,
    Tokens,
    TransferId,
    Whose,
)
from quiesce.core.pairing import pairing_digest
from quiesce.core.records import LENDER_CLOSED, LENDER_GONE
from quiesce.engine.sampler import Sampled
from quiesce.roles.compiling import Compiled

OUTBOX_LIMIT = 65_536  # messages a router may be behind before it is given up
PIECE = 1024  # log-probabilities in one message: far below what a message may hold
LAST_WORDS_SECONDS = 600.0  # how long they are kept for a router that reads nothing and is not known to be dead


class Sender(Protocol):
    def send(self, to: bytes, message: Control) -> bool: ...


@dataclass(eq=False)
class WorkerLeg:
    """One leg of a request, as the router asked for it."""

    start: Start
    router: bytes  # routing id to answer to
    arrived: float
    tokens: list[int] | None = None  # prompt and answer, while it is answered here: its sequence's own
    cached_tokens: int = 0
    tid: TransferId | None = None  # the newest, where it was taken back after a retraction
    offered_by: int | None = None  # prefill: the decode epoch
    left_queue: float | None = None  # when it first got pages
    transfer_began: float | None = None
    transfer_ended: float | None = None  # every page is in place
    grammar: Compiled | None = None

    @property
    def rid(self) -> str:
        return self.start.rid

    @property
    def generated(self) -> int:
        """Tokens of this leg's answer."""
        return 0 if self.tokens is None else len(self.tokens) - len(self.start.token_ids)

    @property
    def peer_epoch(self) -> int | None:
        """Of the process that has the other leg, once it is known. A colocated leg has none."""
        if self.start.prefill is not None:
            return self.start.prefill.epoch
        return self.offered_by

    @property
    def prompt_tokens(self) -> int:
        """Of the client's prompt; what another worker answered already comes after it in the leg's tokens."""
        return len(self.start.token_ids) - self.start.resumed

    def pairing(self, model: str) -> bytes:
        return pairing_digest(self.start.token_ids, model, "", self.start.salt)


@dataclass
class Outbox:
    """What one router has not taken yet; `moved`: when it last took something."""

    waiting: deque[Control] = field(default_factory=deque)
    moved: float | None = None


@dataclass
class Legs:
    """At most one leg per rid and per room; each ends with exactly one `Ended`."""

    sender: Sender
    by_rid: dict[str, WorkerLeg] = field(default_factory=dict)
    by_room: dict[int, WorkerLeg] = field(default_factory=dict)
    outbox: dict[bytes, Outbox] = field(default_factory=dict)
    sent: int = 0  # tokens
    started: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    _gathered: dict[bytes, tuple[list[str], list[int]]] | None = None

    def __len__(self) -> int:
        return len(self.by_rid)

    def open(self, leg: WorkerLeg) -> None:
        self.started += not leg.start.probe
        self.by_rid[leg.rid] = leg
        self.by_room[leg.start.room] = leg

    def refuse(self, start: Start, router: bytes, status: int, reason: str) -> None:
        """A leg that never began: no state is left of it (guard D1)."""
        if not start.probe:
            self.started += 1
            self._count("refused")
        self.tell(router, Ended(start.rid, "refused", status, reason))

    def gather(self) -> None:
        """From here to `send`, plain tokens for one router go together: one message for a step, not one for each."""
        self._gathered = {}

    def send(self) -> None:
        gathered, self._gathered = self._gathered, None
        for router, (rids, token_ids) in (gathered or {}).items():
            self._say(router, rids, token_ids)

    def _say(self, router: bytes, rids: list[str], token_ids: list[int]) -> None:
        if len(rids) == 1:
            self._tell(router, Tokens(rids[0], (token_ids[0],)))
        else:
            self._tell(router, Drawn(tuple(rids), tuple(token_ids)))

    def tokens(self, leg: WorkerLeg, sampled: Sampled) -> None:
        self.sent += not leg.start.probe
        if self._gathered is not None and sampled.logprob is None and not leg.start.probe:
            rids, token_ids = self._gathered.setdefault(leg.router, ([], []))
            rids.append(leg.start.rid)
            token_ids.append(sampled.token)
            return
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        self.tell(leg.router, Tokens(leg.rid, (sampled.token,), logprobs))

    def drawn(self, router: bytes, rids: list[str], token_ids: list[int]) -> None:
        """A plain token for each of these legs of one router, between `gather` and `send`."""
        assert self._gathered is not None
        self.sent += len(rids)
        gathered = self._gathered.setdefault(router, ([], []))
        gathered[0].extend(rids)
        gathered[1].extend(token_ids)

    def prompt_logprobs(self, leg: WorkerLeg, computed: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Those of the positions up to `computed`; the very first token has none."""
        if logprobs or computed == len(leg.start.token_ids) == 1:
            first = computed - len(logprobs) + (1 if computed < len(leg.start.token_ids) else 0)
            said: tuple[TokenLogprob | None, ...] = (None, *logprobs) if first == 1 else logprobs
            first = 0 if first == 1 else first
            for at in range(0, len(said), PIECE):
                self.tell(leg.router, PromptLogprobs(leg.rid, first + at, said[at : at + PIECE]))

    def end(self, leg: WorkerLeg, ended: Ended) -> bool:
        """Says the last word, once. False: it has been said."""
        if self.by_rid.get(leg.rid) is not leg:
            return False
        del self.by_rid[leg.rid]
        del self.by_room[leg.start.room]
        if not leg.start.probe:
            self._count(ended.outcome)
        self.tell(leg.router, ended)
        return True

    def _count(self, outcome: str) -> None:
        self.ended[outcome] = self.ended.get(outcome, 0) + 1

    def tell(self, router: bytes, message: Control) -> None:
        """In order, never lost while the router keeps up; a full queue is retried from `flush`."""
        if self._gathered and router in self._gathered:
            self._say(router, *self._gathered.pop(router))
        self._tell(router, message)

    def _tell(self, router: bytes, message: Control) -> None:
        if router not in self.outbox and self.sender.send(router, message):
            return
        self.outbox.setdefault(router, Outbox()).waiting.append(message)

    def flush(self, now: float) -> list[bytes]:
        """Tries what is waiting; returns the routers whose legs must end, because they are too far behind."""
        lost = []
        for router, outbox in list(self.outbox.items()):
            if outbox.moved is None:
                outbox.moved = now
            while outbox.waiting and self.sender.send(router, outbox.waiting[0]):
                outbox.waiting.popleft()
                outbox.moved = now
            if not outbox.waiting:
                del self.outbox[router]
            elif len(outbox.waiting) > OUTBOX_LIMIT:
                del self.outbox[router]
                lost.append(router)
            elif now - outbox.moved > LAST_WORDS_SECONDS and not self.of(router):
                del self.outbox[router]  # last words to a router that is gone; one that is only slow takes them
        return lost

    def drop(self, router: bytes) -> None:
        """It is dead: nothing is kept for it."""
        self.outbox.pop(router, None)

    def of(self, router: bytes) -> list[WorkerLeg]:
        return [leg for leg in self.by_rid.values() if leg.router == router]


OVERDUE = "not finished within"  # its deadline; the other leg has the same and may hear of it before its own clock
LONE = "no request for room"  # only one leg of it has come: the router that sends both was late


def loss_of(reason: str, due: bool) -> tuple[int, Whose]:
    """Status and fault of a hand-off to this worker that was lost. `due`: its deadline is over here."""
    if due or reason.startswith(OVERDUE):
        return 504, ""
    if reason.startswith(LONE):
        return 502, "router"
    return 503 if reason == PEER_FULL else 502, "peer"


def fault_of(reason: str) -> tuple[int, Whose]:
    """Status and fault of a transfer that was stopped here."""
    if reason.startswith("pairing: "):
        return 409, ""
    theirs = reason in (LENDER_CLOSED, LENDER_GONE, ACCESS_REVOKED) or reason.startswith("decode ")
    return 502, "peer" if theirs else "self"
