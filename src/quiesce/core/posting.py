"""Counting posts: the same for writes (push) and reads (pull), because the count is what speaks (guards A1, A2, A9).

Order within a post: count up, read the stop flag, post. Order of an outcome: taint, count down, look whether to
answer. One thread runs a machine, so "in this order" is the order of the lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from quiesce.core.machine import Action, Post


class Outcome(Enum):
    """How a post ends. Success can be trusted, failure cannot: only the first two say that nothing more lands."""

    PLACED = "placed"  # all of it is in the target's memory
    FAILED_CLEAN = "failed clean"  # failed, and proven that nothing more of it lands
    UNKNOWN = "unknown"  # an error, a timeout, an exception; never becomes safe by time (guard A9)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages in logical order: `source[i]` belongs to page `first + i` of the transfer."""

    source: tuple[int, ...]
    first: int


class Counted(Protocol):
    """What a record needs so that its posts can be counted."""

    queue: deque[Chunk]
    posts: set[int]  # numbers of posts made and not yet terminal
    tainted: bool
    stop: bool

    @property
    def count(self) -> int: ...


R = TypeVar("R", bound=Counted)


class Posting(Generic[R]):
    """`window`: posts that one leg may have under way."""

    window: int

    def __init__(self) -> None:
        self.taints = 0
        self._posts = 0

    def _post(self, record: R, chunk: Chunk, number: int) -> Post:
        raise NotImplementedError

    def _stop(self, record: R) -> None:
        record.stop = True
        record.queue.clear()

    def _pump(self, record: R) -> list[Action]:
        """Posts what the window allows. Before each single post: count up, read the stop flag, post (guard A2)."""
        actions: list[Action] = []
        while record.queue and record.count < self.window:
            self._posts += 1
            record.posts.add(self._posts)
            if record.stop:
                record.posts.discard(self._posts)
                record.queue.clear()
                break
            actions.append(self._post(record, record.queue.popleft(), self._posts))
        return actions

    def _count_down(self, record: R, number: int, outcome: Outcome) -> bool:
        """Taint first, then the count. False: told twice; the count falls once a post (guard A1)."""
        if number not in record.posts:
            return False
        if outcome is Outcome.UNKNOWN:
            record.tainted = True
            self.taints += 1
        record.posts.remove(number)
        return True
