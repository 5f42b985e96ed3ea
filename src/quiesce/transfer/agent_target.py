"""What the posting side remembers: connections, posts, and the parts that they are cut into."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from quiesce.core.posting import Outcome
from quiesce.transfer import attach as wire
from quiesce.transfer.agent import Direction
from quiesce.transfer.couriers import NEVER, Batch, Courier
from quiesce.transfer.interface import Peer, Post

__all__ = ["NEVER", "Open", "Part", "Target", "remember", "written"]

MAX_EPOCHS = 4096


@dataclass(eq=False)
class Open:
    """One post: how many of its parts are not over, and the worst that happened. No outcome before `left` is 0."""

    post: Post
    left: int
    worst: Outcome = Outcome.PLACED
    started: bool = False


@dataclass(eq=False)
class Part:
    open: Open
    direction: Direction
    own: np.ndarray  # int64 [n]
    theirs: np.ndarray
    generation: int  # of its grant


@dataclass(eq=False)
class Target:
    """One connection: the attachment it has now, couriers that still end, and what waits."""

    peer: Peer
    own_epoch: int
    lender: wire.Descriptor
    line: wire.Line | None = None
    connecting: bool = False
    challenge: bytes = b""
    deadline: float | None = None  # of the handshake
    generation: int = 0  # of the newest attachment; 0: none yet
    courier: Courier | None = None
    attached: bool = False
    busy: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # pages that batches at this courier write
    couriers: dict[Courier, set[Batch]] = field(default_factory=dict)  # with the batches that are at each
    # generations under which something was lost that was not shown to have landed; True: something that was written
    unproven: dict[int, bool] = field(default_factory=dict)
    ended: int = 0  # what was written under generations up to it lands no more: its lender says so
    queue: deque[Part] = field(default_factory=deque)
    open_posts: int = 0
    retry_at: float | None = None
    tries: int = 0
    over: bool = False  # disconnected, or the lender is gone for good


def remember(newest: dict[int, int], epoch: int, value: int) -> None:
    """Newest last, and no more than so many peers' epochs."""
    newest.pop(epoch, None)
    newest[epoch] = value
    if len(newest) > MAX_EPOCHS:
        del newest[next(iter(newest))]


def written(moved: Batch | Part) -> np.ndarray:
    """The pages that it writes, so that two writes of one page are never under way together."""
    return moved.theirs if moved.direction == "write" else moved.own
