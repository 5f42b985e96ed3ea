"""The posting side of tcp: splits posts into jobs, spreads them over a lender's lanes, owns every post to its end.

A page of the target always travels on the same lane, so what is written to it keeps its order. When connections are
lost, jobs that were sent stay open until the lender says over a new attachment, before which it has ended the old
one, or by being gone, that nothing of them lands any more: then they end FAILED_CLEAN. No clock decides that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.inbox import Inbox
from quiesce.transfer.interface import Arena, Peer, PeerLost, Post
from quiesce.transfer.tcp_lane import Job, Lane, Sum, Way
from quiesce.transfer.tcp_pages import Pool
from quiesce.transfer.tcp_target import Target, read_descriptor, refusal, split
from quiesce.transfer.tcp_wire import Closed, Kind, Malformed, Status
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

RETRY_FIRST, RETRY_MOST = 0.05, 2.0  # seconds
SAID: dict[int, str] = {
    Status.NOT_OFFERED: "the lender has not offered that",
    Status.REVOKED: "it was fenced on its way",
}


class TcpPoster:
    def __init__(
        self,
        watch: Watch,
        inbox: Inbox,
        max_transfer_pages: int,
        max_open_posts: int,
        max_peers: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._watch, self._inbox, self._tls = watch, inbox, tls
        self._max_transfer_pages = max_transfer_pages
        self._max_open_posts = max_open_posts
        self._max_peers = max_peers
        self._arena: Arena | None = None
        self._pool: Pool | None = None
        self._targets: dict[int, Target] = {}  # by Peer.number
        self._owners: dict[Lane, Target] = {}
        self._open: dict[int, tuple[Sum, list[tuple[Lane, Job]]]] = {}  # by Post.id
        self._last_number = self._last_attachment = 0
        self._ids = itertools.count(1)
        self._closed = False
        self.ended: list[tuple[Post, Outcome]] = []
        self.lost_peers: list[PeerLost] = []
        self.counters: Counter[str] = Counter()

    def use(self, arena: Arena) -> None:
        self._arena = arena
        self._pool = Pool(arena.pages)

    # ------------------------------------------------------------ connections

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        if self._arena is None:
            raise ValueError("register an arena before connecting")
        lender = read_descriptor(descriptor, self._arena, self._tls is not None)
        for known in self._targets.values():
            if known.lender == lender and known.own_epoch == own_epoch and not known.over:
                return known.peer
        if len(self._targets) >= self._max_peers:
            raise ValueError(f"{self._max_peers} connections are open already")
        self._last_number += 1
        target = Target(Peer(lender.epoch, self._last_number), lender, own_epoch)
        self._targets[target.peer.number] = target
        self._attach(target)
        return target.peer

    def _attach(self, target: Target) -> None:
        """A new set of connections, under a number that ends the one before at the lender."""
        target.retry_at = target.losing = None
        self._last_attachment += 1
        target.attachment = self._last_attachment
        target.up.clear()
        lanes = target.lender.lanes
        for lane in range(lanes):
            way = Way(target.lender, target.own_epoch, target.attachment, lane, lanes, self._tls)
            made = Lane(way, self, self._inbox.put)
            self._owners[made] = target
            target.lanes.append(made)
            made.start()

    def disconnect(self, peer: Peer) -> None:
        target = self._targets.get(peer.number)
        if target is None or target.over:
            return
        target.over = True
        for total, jobs in self._jobs_of(target):
            self._fail(total, jobs)
        self._tidy(target)

    def _jobs_of(self, target: Target) -> list[tuple[Sum, list[tuple[Lane, Job]]]]:
        return [self._open[total.post.id] for total in target.posts if total.post.id in self._open]

    def _tidy(self, target: Target) -> None:
        """Who is over leaves once nothing of it is open: its lanes end first."""
        if not target.over or target.posts or target.unsettled:
            return
        for lane in target.lanes:
            lane.end()
        target.retry_at = None
        if not target.lanes:
            self._targets.pop(target.peer.number, None)

    # ------------------------------------------------------------ what lanes say, in the owner's thread

    def lane_up(self, lane: Lane, generation: int) -> None:
        target = self._owners[lane]
        target.up.add(lane.way.lane)
        target.generation = max(target.generation, generation)
        self._listen(target, lane)
        if not target.attached:
            return
        target.tries = 0
        for other in list(self._targets.values()):
            if other.peer.epoch == target.peer.epoch and other.attachment <= target.attachment:
                self._settle(other, "its connection was lost")  # the lender has ended what carried it
        for each in target.lanes:
            each.go()
        self._tidy(target)

    def _listen(self, target: Target, lane: Lane) -> None:
        assert lane.stream is not None
        if target.reads:
            lane.receive_reads()
        else:
            self._watch.add(lane.stream.fileno(), partial(self._on_answers, lane))

    def _on_answers(self, lane: Lane) -> None:
        try:
            lane.read_answers()
        except Closed as error:
            self._lose(self._owners[lane], str(error))
        except Malformed as error:
            self._lose(self._owners[lane], f"the lender broke the protocol: {error}")

    def lane_answered(self, lane: Lane, status: int, job_id: int) -> None:
        target = self._owners[lane]
        job = lane.answered(job_id)
        if job is None:
            self._lose(target, f"the lender answered for job {job_id}, which is not under way")
        elif status == Status.PLACED:
            self.counters["placed_pages"] += job.pages
            self._job_over(target, job, None)
        else:
            self._job_over(target, job, SAID.get(status, f"the lender says {status}"))

    def lane_over(self, lane: Lane, reason: str, final: bool) -> None:
        target = self._owners[lane]
        target.final = target.final or (final and lane in target.lanes)
        self._lose(target, reason)
        if not all(each.done for each in target.lanes):
            return
        self._gather(target)
        successor = self._successor(target)
        if target.final:
            self._gone(target, target.losing or reason)
        elif successor is not None:
            if successor.attached:
                self._settle(target, "its connection was lost")
        elif target.over and not target.unsettled:
            self._tidy(target)
        else:
            target.losing = None
            target.retry_at = time.monotonic() + min(RETRY_MOST, RETRY_FIRST * 2 ** min(target.tries, 10))
            target.tries += 1

    def _lose(self, target: Target, reason: str) -> None:
        """The attachment ends as a whole."""
        if target.losing is None:
            if target.attached and not target.over:
                self.lost_peers.append(PeerLost(target.peer.epoch, target.generation, reason, False))
            target.losing = reason
            for lane in target.lanes:
                if lane.stream is not None:
                    self._watch.remove(lane.stream.fileno())
                lane.end()

    def _gather(self, target: Target) -> None:
        """All its threads are out: close its sockets; what was never sent has failed, the rest is unsettled."""
        lanes, target.lanes = target.lanes, []
        target.up.clear()
        unsent: list[Job] = []
        for lane in lanes:
            lane.close()
            del self._owners[lane]
            target.unsettled += lane.sent.values()
            unsent += lane.queue
            lane.queue.clear()
        for job in unsent:
            self._job_over(target, job, f"not connected: {target.losing}")

    def _successor(self, target: Target) -> Target | None:
        """The connection that was made to the same lender after this one was given up."""
        same = (t for t in self._targets.values() if t.peer.epoch == target.peer.epoch)
        return next((t for t in same if t.attachment > target.attachment and not t.over), None)

    def _gone(self, target: Target, reason: str) -> None:
        """Its process is gone, or wants nothing of us: nothing lands there any more. If we leave, who knows."""
        if not target.over:
            self.lost_peers.append(PeerLost(target.peer.epoch, target.generation, reason, True))
        target.over = True
        for job in target.unsettled:
            job.total.unknown = self._closed
        self._settle(target, reason)

    def _settle(self, target: Target, reason: str) -> None:
        unsettled, target.unsettled = target.unsettled, []
        for job in unsettled:
            self._job_over(target, job, reason)
        self._tidy(target)

    def tick(self, now: float) -> None:
        for target in list(self._targets.values()):
            if target.retry_at is not None and target.retry_at <= now:
                self._attach(target)

    def next_deadline(self) -> float | None:
        soonest = None  # asked for with every post, so without a list of them
        for target in self._targets.values():
            if target.retry_at is not None and (soonest is None or target.retry_at < soonest):
                soonest = target.retry_at
        return soonest

    # ------------------------------------------------------------ posts

    def post(self, kind: Kind, peer: Peer, own: Sequence[int], remote: Sequence[int], grant: Grant) -> Post:
        self.counters["posts"] += 1
        post = Post(next(self._ids), peer)
        target = self._targets.get(peer.number)
        refused = self._refusal(target, own, remote, grant)
        if refused is not None or target is None:
            log.info("post %d to epoch %x refused, nothing was touched: %s", post.id, peer.epoch, refused)
            self._tell(post, Outcome.FAILED_CLEAN)
            return post
        if not len(own):
            self._tell(post, Outcome.PLACED)
            return post
        if kind is Kind.READ and not target.reads:
            self._begin_reads(target)
        total = Sum(post, 0)
        assert self._pool is not None
        jobs = split(self._pool, self._max_transfer_pages, self._ids, total, kind, target.lanes, own, remote, grant)
        total.left = len(jobs)
        self._open[post.id] = (total, jobs)
        target.posts.append(total)
        for lane, job in jobs:
            lane.add(job)
        for lane in {lane: None for lane, _ in jobs}:
            lane.go()
        return post

    def _begin_reads(self, target: Target) -> None:
        target.reads = True
        for lane in target.lanes:
            if lane.stream is not None:
                self._watch.remove(lane.stream.fileno())
                lane.receive_reads()

    def _refusal(self, target: Target | None, own: Sequence[int], remote: Sequence[int], grant: Grant) -> str | None:
        if target is None:
            return "the connection is closed"
        if len(self._open) >= self._max_open_posts:
            return f"{self._max_open_posts} posts are open already"
        assert self._arena is not None
        return refusal(target, self._arena.count, own, remote, grant)

    def _job_over(self, target: Target, job: Job, reason: str | None) -> None:
        total = job.total
        total.left -= 1
        if reason is not None and not total.failed:
            log.info("post %d to epoch %x failed: %s", total.post.id, target.peer.epoch, reason)
            self._fail(total, self._open[total.post.id][1])
        if total.left == 0:
            self._tell_in_order(target)

    def _fail(self, total: Sum, jobs: list[tuple[Lane, Job]]) -> None:
        """The first failure ends the loop: its jobs that were not sent never are (guard L8)."""
        total.failed = True
        total.left -= sum(self._take_back(lane, job) for lane, job in jobs)
        if total.left == 0:
            self._tell_in_order(self._targets[total.post.peer.number])

    @staticmethod
    def _take_back(lane: Lane, job: Job) -> bool:
        with lane.cond:
            if job not in lane.queue:
                return False
            lane.queue.remove(job)
            return True

    def _tell_in_order(self, target: Target) -> None:
        while target.posts and target.posts[0].left == 0:
            total = target.posts.popleft()
            if self._open.pop(total.post.id, None) is not None:
                failed = Outcome.UNKNOWN if total.unknown else Outcome.FAILED_CLEAN
                self._tell(total.post, failed if total.failed else Outcome.PLACED)
        self._tidy(target)

    def _tell(self, post: Post, outcome: Outcome) -> None:
        self.counters["failed_posts"] += outcome is not Outcome.PLACED
        self.ended.append((post, outcome))

    def try_cancel(self, post: Post) -> bool:
        total, jobs = self._open.get(post.id, (None, []))
        target = self._targets.get(post.peer.number)
        if total is None or target is None or total.failed:
            return False
        with contextlib.ExitStack() as locked:
            for lane in {lane: None for lane, _ in jobs}:
                locked.enter_context(lane.cond)
            if not all(job in lane.queue for lane, job in jobs):
                return False
            for lane, job in jobs:
                lane.queue.remove(job)
        del self._open[post.id]
        target.posts.remove(total)
        self._tell_in_order(target)
        return True

    def open_posts(self, peer: Peer) -> int:
        target = self._targets.get(peer.number)
        return 0 if target is None else len(target.posts)

    def fence_reads(self, peer_epoch: int, generation: int, pages: frozenset[int] | None) -> None:
        """From the return on no read of ours under these generations fills one of the pages."""
        for target in self._targets.values():
            if target.peer.epoch != peer_epoch or not target.reads:
                continue
            for total, jobs in self._jobs_of(target):
                for job in (job for _, job in jobs if job.kind is Kind.READ and job.generation <= generation):
                    if not (pages and job.gate.pages.isdisjoint(pages)):
                        job.gate.open, total.failed = False, True
            for lane in target.lanes:
                if lane.stream is not None:
                    lane.stream.barrier()

    @property
    def busy(self) -> bool:
        return bool(self._targets)

    def close(self) -> None:
        """Threads end soon after; posts that were sent end UNKNOWN."""
        self._closed = True
        for target in list(self._targets.values()):
            target.over, target.final = True, True
            if target.lanes:
                self._lose(target, "closed")
            else:
                self._gone(target, "closed")
