"""Posts between the machine that counts them and the transport that makes them: each gets exactly one outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quiesce.core.borrowing import PostEnded
from quiesce.core.machine import Post
from quiesce.core.messages import Leg
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import Peer
from quiesce.transfer.interface import Post as Made

log = logging.getLogger("quiesce.posts")


class Posts:
    """`tell` takes a `PostEnded` for each post."""

    def __init__(self, tell: Callable[[PostEnded], None]) -> None:
        self._tell = tell
        self._open: dict[int, tuple[Leg, int, float]] = {}  # by the transport's id: whose, its number, since when

    def make(self, post: Post, peer: Peer | None, call: Callable[[Peer], Made]) -> None:
        if peer is None:  # its process is gone and the connection with it: nothing was handed to anybody
            self._tell(PostEnded(post.leg, post.number, Outcome.FAILED_CLEAN))
            return
        try:
            made = call(peer)
        except Exception as error:  # an exception between post and outcome taints (guard A12)
            log.exception("post %d raised", post.number, exc_info=error, extra={"transfer": str(post.leg.tid)})
            self._tell(PostEnded(post.leg, post.number, Outcome.UNKNOWN))
            return
        self._open[made.id] = (post.leg, post.number, time.monotonic())

    def ended(self, made: Made, outcome: Outcome) -> None:
        known = self._open.pop(made.id, None)  # None: the call raised after it had taken the post; it is tainted
        if known is not None:
            leg, number, _ = known
            self._tell(PostEnded(leg, number, outcome))

    def oldest_ms(self, leg: Leg) -> int:
        """Age of the oldest post for it that has not ended; 0 without one."""
        began = [since for owner, _, since in self._open.values() if owner == leg]
        return int((time.monotonic() - min(began)) * 1000) if began else 0

    def __len__(self) -> int:
        return len(self._open)
