"""Which workers there are, by name and epoch, and which of them can be given work. No I/O; time is handed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from quiesce.core.messages import Exited, Register
from quiesce.router.breaker import Breaker, BreakerRules

MAX_WORKERS = 1024
REMEMBERED_EPOCHS = 4096
LEG_TOKENS = 128  # what a running request costs a worker, in tokens of prompt


@dataclass(frozen=True)
class Patience:
    """Seconds. `silent`: no heartbeat, so not chosen; what it has, waits. `lost`: silent so long that its requests
    end, the hold timeout. A dead worker is known at once, by its connection or the supervisor. `stalled`: work but
    no loop progress. `probe`: no loop progress and no answer to a test request either. `forgotten`: silent so long
    that its entry goes. `pause`: a sweep this late means that we were away ourselves."""

    silent: float = 4.0
    lost: float = 30.0
    stalled: float = 30.0
    probe: float = 5.0
    forgotten: float = 60.0
    pause: float = 1.0

    @classmethod
    def for_hold_timeout(cls, seconds: float) -> Patience:
        """A worker that stops for less than the hold timeout and goes on loses no request."""
        return cls(silent=min(cls.silent, seconds), lost=seconds, forgotten=max(cls.forgotten, 2 * seconds))


@dataclass
class Worker:
    """One epoch of one worker."""

    latest: Register
    user: str  # the key it proved
    seen: float
    moved: float  # when `progress` last changed, it was idle, or it passed a probe
    stepped: float = 0.0  # as `moved`, and by nothing else
    up: bool = False  # the link to its control socket
    legs: set[str] = field(default_factory=set)  # rids it has not ended
    breaker: Breaker = field(default_factory=Breaker)
    probes: dict[str, float] = field(default_factory=dict)  # test requests that are out -> when they were sent
    probe_answered: float = 0.0
    probe_error: str = ""  # why its last one failed
    drained: str = ""  # why an operator lets it have no new work
    sent_tokens: int = 0  # of prompts that it was given since its last heartbeat
    chosen: int = 0  # turn at which it was last chosen
    told_silent: bool = False
    told_lost: bool = False

    @property
    def name(self) -> str:
        return self.latest.address.name

    @property
    def epoch(self) -> int:
        return self.latest.address.epoch

    @property
    def role(self) -> str:
        return self.latest.role

    def unheard(self, now: float, patience: Patience) -> str | None:
        """Why it cannot be talked to, for people; None when it can."""
        if not self.up:
            return "the router's connection to it is down"
        if now - self.seen > patience.silent:
            return f"no heartbeat for {now - self.seen:.1f} s"
        return None

    def trouble(self, now: float, patience: Patience) -> str | None:
        """Why it cannot be trusted with work now, for people; None when it can."""
        if (why := self.unheard(now, patience)) is not None:
            return why
        if self.latest.draining or self.drained:
            return self.drained or "it is draining: it ends once its requests have"
        if self.busy and now - self.moved > patience.stalled:
            return f"its engine loop has not moved for {now - self.moved:.1f} s"
        out = now - max(self.probe_sent or now, self.moved)
        if out > patience.probe:
            return f"it does not move, and a test request has not come back for {out:.1f} s"
        return self.probe_error or self.breaker.trouble(now)

    @property
    def busy(self) -> bool:
        return bool(self.latest.queued or self.latest.running)

    @property
    def probe_sent(self) -> float | None:
        """When the oldest test request that is out was sent."""
        return min(self.probes.values(), default=None)

    @property
    def load(self) -> int:
        """Tokens of work: prompts that wait at it, and a share for every request that it has."""
        reported = self.latest.queued + self.latest.running  # another router's requests are in here too
        return self.latest.waiting_tokens + self.sent_tokens + LEG_TOKENS * max(len(self.legs), reported)

    def begin(self, rid: str, tokens: int) -> None:
        """It is given a leg."""
        self.legs.add(rid)
        self.sent_tokens += tokens
        self.breaker.begin(rid)

    def over(self, rid: str) -> None:
        """It has ended the leg, or never will."""
        self.legs.discard(rid)
        self.breaker.over(rid)

    @property
    def full(self) -> bool:
        return len(self.legs) >= self.latest.limits.max_queued


# ---------------------------------------------------------------- changes for whoever owns the sockets


@dataclass(frozen=True)
class Connect:
    worker: Worker


@dataclass(frozen=True)
class Lost:
    """Its legs end. `gone`: it will not come back under this epoch, so its link is closed."""

    worker: Worker
    reason: str
    gone: bool


@dataclass(frozen=True)
class Silent:
    """It is given no new work; nothing else changes."""

    worker: Worker
    reason: str


Change = Connect | Lost | Silent


class Registry:
    def __init__(self, patience: Patience | None = None, breaker: BreakerRules | None = None) -> None:
        self.patience = patience or Patience()
        self._breaker = breaker or BreakerRules()
        self.workers: dict[str, Worker] = {}
        self.refused = 0  # registrations not accepted
        self.departed: deque[dict[str, Any]] = deque(maxlen=16)
        self._over: dict[int, None] = {}  # epochs that ended; a late heartbeat does not revive them
        self._swept: float | None = None
        self._opened_before = 0  # times that breakers of departed workers opened

    def on_register(self, message: Register, user: str, now: float) -> list[Change]:
        """A heartbeat, the first one included. A worker may speak for its own key alone."""
        address = message.address
        if user != address.public_key or address.epoch in self._over:
            self.refused += 1
            return []
        known = self.workers.get(address.name)
        if known is not None and known.epoch == address.epoch:
            if known.latest.progress != message.progress:
                known.moved = known.stepped = now
            elif not (message.queued or message.running):
                known.moved = now
            known.latest, known.seen, known.sent_tokens = message, now, 0
            known.told_silent = known.told_lost = False
            return []
        if known is None and len(self.workers) >= MAX_WORKERS:
            self.refused += 1
            return []
        if known is not None and known.user != user and known.unheard(now, self.patience) is None:
            self.refused += 1  # a healthy worker's name is not taken over by another key
            return []
        changes = self._remove(known, "it was replaced by a new process", now) if known is not None else []
        worker = Worker(message, user, seen=now, moved=now, breaker=Breaker(self._breaker))
        self.workers[address.name] = worker
        return [*changes, Connect(worker)]

    @property
    def breakers_opened(self) -> int:
        return self._opened_before + sum(worker.breaker.opened for worker in self.workers.values())

    def knows(self, epoch: int) -> bool:
        return any(worker.epoch == epoch for worker in self.workers.values())

    def on_exited(self, message: Exited, user: str, now: float) -> list[Change]:
        """The supervisor's word. A worker may say it of itself, not of others."""
        known = self.workers.get(message.name)
        if any(worker.user == user and worker.name != message.name for worker in self.workers.values()):
            self.refused += 1
            return []
        self._remember(message.epoch)
        if known is None or known.epoch != message.epoch:
            return []
        return self._remove(known, "its process ended", now)

    def remove(self, worker: Worker, reason: str, now: float) -> list[Change]:
        return self._remove(worker, reason, now)

    def on_link(self, worker: Worker, up: bool) -> list[Change]:
        was_up, worker.up = worker.up, up
        if up or not was_up:
            return []
        return [Lost(worker, f"worker {worker.name} closed its connection or died", gone=False)]

    def sweep(self, now: float) -> list[Change]:
        """Call several times a second."""
        paused = self._swept is not None and now - self._swept > self.patience.pause
        self._swept = now
        changes: list[Change] = []
        for worker in list(self.workers.values()):
            if paused:  # we were away: heartbeats that wait in our inbox are not silence
                worker.seen, worker.moved = max(worker.seen, now), max(worker.moved, now)
                continue
            quiet = now - worker.seen
            reason = f"worker {worker.name} has sent no heartbeat for {quiet:.1f} s"
            if quiet > self.patience.forgotten:
                changes += self._remove(worker, reason, now, over=False)
            elif quiet > self.patience.lost and not worker.told_lost:
                worker.told_lost = True
                changes.append(Lost(worker, reason, gone=False))
            elif quiet > self.patience.silent and not worker.told_silent:
                worker.told_silent = True
                changes.append(Silent(worker, reason))
        return changes

    def _remove(self, worker: Worker, reason: str, now: float, over: bool = True) -> list[Change]:
        del self.workers[worker.name]
        self._opened_before += worker.breaker.opened
        if over:
            self._remember(worker.epoch)
        self.departed.append({"name": worker.name, "epoch": f"{worker.epoch:016x}", "reason": reason, "at": now})
        return [Lost(worker, f"worker {worker.name} is gone: {reason}", gone=True)]

    def _remember(self, epoch: int) -> None:
        self._over[epoch] = None
        if len(self._over) > REMEMBERED_EPOCHS:
            del self._over[next(iter(self._over))]
