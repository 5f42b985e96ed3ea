"""`--reserve late`: decode takes pages for a request when prefill's queue has reached it, not before.

Hints only: decode asks, prefill says "reached", decode offers. A lost hint is asked for again; a wrong one costs
time, never safety, because nothing is lent before the offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

ASK_AGAIN = 0.25  # seconds
MOST_ROOMS = 4096
PATIENCE = 1.0  # seconds that prefill keeps a turn for an offer that does not come
UNASKED = 8 * ASK_AGAIN  # seconds after which a room that is not asked about again has no request any more


@dataclass
class Asking:
    """The decode side. `ask(prefill, room)` sends the question."""

    ask: Callable[[int, int], bool]  # (prefill epoch, room)
    now: Callable[[], float] = time.monotonic
    _next: dict[int, float] = field(default_factory=dict)  # room -> when to ask again
    _reached: set[int] = field(default_factory=set)

    def may_offer(self, prefill: int, room: int) -> bool:
        """Whether its turn has come; asks when it has not."""
        if room in self._reached:
            return True
        if self._next.get(room, 0.0) <= self.now():
            self._next[room] = self.now() + ASK_AGAIN
            self.ask(prefill, room)
        return False

    def reached(self, room: int) -> None:
        if room in self._next:
            self._reached.add(room)

    def forget(self, room: int) -> None:
        self._next.pop(room, None)
        self._reached.discard(room)

    def __len__(self) -> int:
        return len(self._next)


@dataclass
class Turns:
    """The prefill side: rooms in the order in which they were asked about, and those whose turn it is."""

    say: Callable[[int, int], bool]  # (decode epoch, room)
    now: Callable[[], float] = time.monotonic
    _waiting: dict[int, tuple[int, float]] = field(default_factory=dict)  # room -> decode epoch, when asked last
    _called: dict[int, float] = field(default_factory=dict)  # room -> until when its turn is kept

    def asked(self, decode: int, room: int) -> None:
        if room in self._called:
            self.say(decode, room)  # the answer was lost
        elif room in self._waiting or len(self._waiting) < MOST_ROOMS:
            self._waiting[room] = (decode, self.now())

    def call(self, free: int, known: Callable[[int], bool]) -> None:
        """Calls the next rooms for `free` places. A room whose request has not arrived yet keeps its place for as
        long as it is asked about: a question may also come late, when its request is over."""
        now = self.now()
        self._called = {room: until for room, until in self._called.items() if until > now}
        for room, (decode, asked) in list(self._waiting.items()):
            if now - asked > UNASKED:
                del self._waiting[room]
            elif len(self._called) < free and known(room):
                del self._waiting[room]
                self._called[room] = now + PATIENCE
                self.say(decode, room)

    def forget(self, room: int) -> None:
        """Its offer has come, or its request has ended."""
        self._waiting.pop(room, None)
        self._called.pop(room, None)

    def drop(self, decode: int) -> None:
        """That decode engine is gone."""
        self._waiting = {room: asked for room, asked in self._waiting.items() if asked[0] != decode}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._called)
