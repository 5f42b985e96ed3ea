"""The posting side of engines with agents: cuts posts into batches, and owns every post to its end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.agent import Direction, Engine
from quiesce.transfer.agent_connections import Connections
from quiesce.transfer.agent_target import NEVER, Open, Part, Target, remember, written
from quiesce.transfer.couriers import Batch, Courier, Told
from quiesce.transfer.interface import Peer, Post
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

BATCH_BYTES = 64 << 20  # up to which posts that wait are put together: each batch costs a turn of two threads


def _together(pages: list[np.ndarray]) -> np.ndarray:
    return pages[0] if len(pages) == 1 else np.concatenate(pages)


class AgentPoster(Connections):
    def __init__(
        self, watch: Watch, told: Told, engine: Engine, max_transfer_pages: int, max_open_posts: int, max_peers: int
    ) -> None:
        super().__init__(watch, told, engine, max_peers)
        self._part_pages = min(max_transfer_pages, engine.limits.pages_in_flight)
        self._max_open_posts = max_open_posts
        self._parts: dict[Batch, list[Part]] = {}  # at a courier
        self._opens: dict[int, Open] = {}  # by Post.id
        self._last_post = 0
        self._newest_read: dict[int, int] = {}  # by the peer's epoch: newest generation that we read under
        self._reads_fenced: dict[int, int] = {}  # ... up to which reads are refused
        self._reads_left: dict[int, int] = {}  # ... oldest whose reads ended without proof
        self.ended: list[tuple[Post, Outcome]] = []
        names = ("posts", "placed_pages", "failed_posts", "unknown_posts", "drain_writes", "agents_lost")
        self.counters = dict.fromkeys(names, 0)

    # ------------------------------------------------------------ what couriers tell

    def placed(self, courier: Courier, batch: Batch) -> None:
        if self._is_over(batch):
            return
        self.counters["placed_pages"] += len(batch.own)
        self._batch_over(courier, batch, Outcome.PLACED)

    def lost(self, courier: Courier, batch: Batch, started: bool, reason: str) -> None:
        target = self._by_courier[courier]
        log.info("a batch of %d pages to epoch %x is lost: %s", len(batch.own), target.peer.epoch, reason)
        courier.read_lost |= started and batch.direction == "read"
        if self._is_over(batch):
            return
        if started:
            written_there = batch.direction == "write" and courier.generation > target.ended
            target.unproven[courier.generation] = target.unproven.get(courier.generation, False) or written_there
        self._batch_over(courier, batch, Outcome.UNKNOWN if started else Outcome.FAILED_CLEAN)

    def flushed(self, courier: Courier) -> None:
        self.counters["drain_writes"] += 1
        self._by_courier[courier].unproven.pop(courier.generation, None)

    def broken(self, courier: Courier, reason: str) -> None:
        target = self._by_courier[courier]
        self.counters["agents_lost"] += 1
        log.warning("the connection to epoch %x is made anew: %s", target.peer.epoch, reason)
        if target.courier is courier:
            self._on_lost(target, reason, final=False)
        else:
            courier.end()

    def courier_ended(self, courier: Courier, clean: bool) -> None:
        """The end of its agent proves that what it read ended with it; of what it wrote it proves nothing."""
        target = self._by_courier[courier]
        for batch in list(target.couriers[courier]):  # leaving the process, it did not wait for them
            self._batch_over(courier, batch, Outcome.UNKNOWN)
        if clean and not target.unproven.get(courier.generation, True):
            del target.unproven[courier.generation]
        if not clean and courier.oldest_read < NEVER:
            left = self._reads_left.get(target.peer.epoch, NEVER)
            self._reads_left[target.peer.epoch] = min(left, courier.oldest_read)
        self.last_word(courier, clean and not courier.read_lost)
        del target.couriers[courier], self._by_courier[courier]
        self.tidy(target)

    # ------------------------------------------------------------ posts

    def post(self, direction: Direction, peer: Peer, own: Sequence[int], theirs: Sequence[int], grant: Grant) -> Post:
        self.counters["posts"] += 1
        self._last_post += 1
        post = Post(self._last_post, peer)
        target = self._targets.get(peer.number)
        refusal: str | None
        try:
            ours, far = np.asarray(own, np.int64), np.asarray(theirs, np.int64)
            refusal = self._refusal(direction, target, ours, far, grant)
        except OverflowError:
            refusal = "a page's number is beyond any pool"
        if refusal is not None or target is None:
            log.info("post %d to epoch %x refused, nothing was touched: %s", post.id, peer.epoch, refusal)
            self._end(post, Outcome.FAILED_CLEAN)
            return post
        if not len(own):
            self._end(post, Outcome.PLACED)
            return post
        starts = range(0, len(ours), self._part_pages)
        opened = self._opens[post.id] = Open(post, len(starts))
        target.open_posts += 1
        for start in starts:
            part = slice(start, start + self._part_pages)
            target.queue.append(Part(opened, direction, ours[part], far[part], grant.generation))
        if direction == "read":
            remember(self._newest_read, peer.epoch, max(grant.generation, self._newest_read.get(peer.epoch, 0)))
        self._feed(target)
        return post

    def _refusal(
        self, direction: Direction, target: Target | None, own: np.ndarray, theirs: np.ndarray, grant: Grant
    ) -> str | None:
        if target is None or target.over:
            return "the connection is closed or its lender is gone"
        if not target.attached:
            return "it is not attached now"
        if grant.generation != target.generation or grant.region != target.lender.region:
            return f"granted under generation {grant.generation}, attached under {target.generation}"
        if direction == "read" and grant.generation <= self._reads_fenced.get(target.peer.epoch, 0):
            return "reads under its grant were fenced"
        if len(self._opens) >= self._max_open_posts:
            return f"{self._max_open_posts} posts are open already"
        if len(own) != len(theirs):
            return f"{len(own)} own pages for {len(theirs)} of the peer"
        assert self._arena is not None
        if len(own) and (own.min() < 0 or own.max() >= self._arena.count):
            return f"an own page is outside 0..{self._arena.count - 1}"
        if len(theirs) and (theirs.min() < 0 or theirs.max() >= target.lender.pages):
            return f"a page of the peer is outside 0..{target.lender.pages - 1}"
        if not frozenset(grant.pages).issuperset(theirs.tolist()):
            return "a page of the peer is not in the grant"
        return None

    def _feed(self, target: Target) -> None:
        """Hands batches to the courier: what waits is put together as long as no page is written twice at a time."""
        courier = target.courier
        while target.queue and courier is not None and target.attached:
            under_way = target.couriers[courier]
            if len(under_way) >= self._engine.limits.batches_in_flight:
                return
            parts = self._gather(target)
            if not parts:
                return
            own, theirs = (_together([getattr(part, side) for part in parts]) for side in ("own", "theirs"))
            batch = Batch(parts[0].direction, own, theirs)
            self._parts[batch] = parts
            under_way.add(batch)
            for part in parts:
                part.open.started = True
                if part.direction == "read":
                    courier.oldest_read = min(courier.oldest_read, part.generation)
            courier.post(batch)

    def _gather(self, target: Target) -> list[Part]:
        parts: list[Part] = []
        most = min(self._engine.limits.pages_in_flight, BATCH_BYTES // target.lender.page_bytes)
        room = max(self._part_pages, most)
        while target.queue:
            part = target.queue[0]
            pages = written(part)
            mixed = parts and part.direction != parts[0].direction
            if mixed or len(pages) > room or target.busy[pages].any():
                break
            parts.append(target.queue.popleft())
            target.busy[pages] = True
            room -= len(pages)
        return parts

    def _batch_over(self, courier: Courier, batch: Batch, outcome: Outcome) -> None:
        target = self._by_courier[courier]
        target.couriers[courier].discard(batch)
        if courier is target.courier:
            target.busy[written(batch)] = False
        for part in self._parts.pop(batch):
            self._part_over(target, part, outcome)
        if not target.couriers[courier] and courier.generation not in target.unproven:
            courier.oldest_read = NEVER
        self._feed(target)

    def drop_waiting(self, target: Target) -> None:
        waiting, target.queue = target.queue, deque()
        for part in waiting:
            self._part_over(target, part, Outcome.FAILED_CLEAN)

    def _part_over(self, target: Target, part: Part, outcome: Outcome) -> None:
        opened = part.open
        opened.left -= 1
        if outcome is not Outcome.PLACED:
            if opened.worst is not Outcome.UNKNOWN:
                opened.worst = outcome
            for later in [waiting for waiting in target.queue if waiting.open is opened]:
                target.queue.remove(later)
                opened.left -= 1
        if opened.left == 0 and self._opens.pop(opened.post.id, None) is not None:
            target.open_posts -= 1
            self._end(opened.post, opened.worst)
            self.tidy(target)

    def try_cancel(self, post: Post) -> bool:
        opened, target = self._opens.get(post.id), self._targets.get(post.peer.number)
        if opened is None or target is None or opened.started:
            return False
        target.queue = deque(part for part in target.queue if part.open is not opened)
        del self._opens[post.id]
        target.open_posts -= 1
        self.tidy(target)
        return True

    def fence_reads(self, peer_epoch: int, generation: int) -> bool | None:
        """Nothing that was read from it under generations <= `generation` lands in own pages any more: True, or False
        for not yet or never. None: nothing was ever read from it. Where reads are diverted they are over now; the
        courier, its agent and its window stay until the engine has let go of them."""
        if peer_epoch not in self._newest_read:
            return None
        remember(self._reads_fenced, peer_epoch, max(generation, self._reads_fenced.get(peer_epoch, 0)))
        over = True
        for target in [target for target in self._targets.values() if target.peer.epoch == peer_epoch]:
            for courier in [courier for courier in target.couriers if courier.oldest_read <= generation]:
                if self._engine.limits.diverts:
                    courier.divert()
                else:
                    over = False
            if target.courier is not None and target.courier.generation <= generation:
                # though nothing may be under way: what is granted from now on has to be under another generation
                self._on_lost(target, "own reads were fenced", final=False)
            for courier in [courier for courier in target.couriers if courier.diverted]:
                self._end_reads(courier)
        return over and self._reads_left.get(peer_epoch, NEVER) > generation

    def _end_reads(self, courier: Courier) -> None:
        """After it was diverted: a lender that stands still would keep them open for as long as it does."""
        for batch in [batch for batch in self._by_courier[courier].couriers[courier] if batch.direction == "read"]:
            self._batch_over(courier, batch, Outcome.FAILED_CLEAN)
        courier.oldest_read = NEVER

    def _is_over(self, batch: Batch) -> bool:
        """A read that was diverted: its outcome was told then, whatever its engine says of it now."""
        return batch not in self._parts

    def drained(self, peer: Peer) -> bool:
        target = self._targets.get(peer.number)
        if target is None:
            return peer.number > self.undrained_through
        return not target.open_posts and not target.unproven

    def _end(self, post: Post, outcome: Outcome) -> None:
        self.counters["failed_posts"] += outcome is not Outcome.PLACED
        self.counters["unknown_posts"] += outcome is Outcome.UNKNOWN
        self.ended.append((post, outcome))

    def close(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for target in self._targets.values():
            target.over, target.retry_at = True, None
            for courier in target.couriers:
                courier.abandoned = True
            self._detach(target)
        for target in self._targets.values():
            for courier in target.couriers:
                courier.wait(max(0.0, until - time.monotonic()))
        self._told.turn()
        for opened in self._opens.values():
            self._end(opened.post, Outcome.UNKNOWN)
        self._opens.clear()
