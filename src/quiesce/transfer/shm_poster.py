"""The posting side of shared memory: splits posts into jobs, keeps the mover busy, owns every post to its end."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer import mover_wire as wire
from quiesce.transfer.interface import Arena, Peer, PeerLost, Post
from quiesce.transfer.mover_process import MoverProcess
from quiesce.transfer.shm_target import Sum, Target, read_descriptor, refusal_of
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

JOBS_AT_MOVER = 8  # per lender; what is behind them can still be cancelled
RETRY_FIRST, RETRY_MOST = 0.05, 2.0  # seconds
STALL_SECONDS = 30.0
_OVERDUE = 1.0  # a check this late means that we were away ourselves: the mover gets as long to speak
_SETTLED = 10.0  # a mover that lived this long is not part of a crash loop


class Poster:
    """`stall_seconds`: a mover that has work and says nothing for so long is ended and started again. `reads`: the
    mover may also copy into our own pool."""

    def __init__(
        self,
        watch: Watch,
        max_transfer_pages: int,
        max_open_posts: int,
        max_peers: int,
        stall_seconds: float = STALL_SECONDS,
        reads: bool = False,
    ) -> None:
        self._watch = watch
        self._reads = reads
        self._stall_seconds = stall_seconds
        self._stall_at: float | None = None  # None: nothing is owed
        self._max_transfer_pages = max_transfer_pages
        self._max_open_posts = max_open_posts
        self._max_peers = max_peers
        self._arena: Arena | None = None
        self._mover: MoverProcess | None = None
        self._restart_at: float | None = None
        self._crashes = 0
        self._closed = False
        self._lenders: dict[int, Target] = {}  # by Peer.number; leaves when over and nothing is open
        self._sums: dict[int, Sum] = {}  # by Post.id
        self._jobs: dict[int, tuple[Sum, Target, int]] = {}  # with the mover: job id -> whose, pages
        self._job_posts: dict[int, Sum] = {}  # queued here
        self._last_number = self._last_job = 0
        self._blocked = False
        self.ended: list[tuple[Post, Outcome]] = []
        self.lost_peers: list[PeerLost] = []
        self.counters = dict.fromkeys(("posts", "placed_pages", "failed_posts", "mover_deaths", "mover_stalls"), 0)

    def use(self, arena: Arena) -> None:
        self._arena = arena

    # ------------------------------------------------------------ connections

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        if self._arena is None:
            raise ValueError("register an arena before connecting")
        lender = read_descriptor(descriptor, self._arena.page_bytes)
        for known in self._lenders.values():
            if known.request.lender == lender and known.request.own_epoch == own_epoch and not known.over:
                return known.peer
        if len(self._lenders) >= self._max_peers:
            raise ValueError(f"{self._max_peers} connections are open already")
        self._last_number += 1
        peer = Peer(lender.epoch, self._last_number)
        state = Target(peer, wire.Attach(peer.number, own_epoch, lender))
        self._lenders[peer.number] = state
        if self._mover is not None:
            self._attach(state)
        elif self._restart_at is None:
            self._start_mover()
        return peer

    def disconnect(self, peer: Peer) -> None:
        state = self._lenders.get(peer.number)
        if state is None or state.over:
            return
        self._give_up(state)
        if self._mover is not None and not self._mover.send(wire.Detach(peer.number)):
            self._mover.kill()  # cannot be told, so it is ended: its other lenders are attached anew

    def _give_up(self, state: Target) -> None:
        state.over, state.attached, state.retry_at = True, False, None
        self._drop_queue(state, lambda job: True)
        self._tidy(state)

    def _attach(self, state: Target) -> None:
        assert self._mover is not None
        state.retry_at = None
        if not self._mover.send(state.request):
            self._retry(state)

    def _retry(self, state: Target) -> None:
        state.retry_at = time.monotonic() + min(RETRY_MOST, RETRY_FIRST * 2 ** min(state.tries, 10))
        state.tries += 1

    # ------------------------------------------------------------ the mover's life

    def _start_mover(self) -> None:
        assert self._arena is not None
        self._restart_at = None
        try:
            self._mover = MoverProcess(self._watch, self._arena, self._on_packet, self._on_exit, self._reads)
        except OSError as error:
            log.error("cannot start the mover process: %s; trying again", error)
            self._plan_restart()
            return
        for state in self._lenders.values():
            if not state.over:
                self._attach(state)

    def _plan_restart(self) -> None:
        delay = min(RETRY_MOST, RETRY_FIRST * 2 ** min(self._crashes, 10)) if self._crashes else 0.0
        self._crashes += 1
        self._restart_at = time.monotonic() + delay

    def _on_exit(self) -> None:
        """The mover is dead and reaped: whatever it had not reported will never be written."""
        assert self._mover is not None
        if time.monotonic() - self._mover.started > _SETTLED:
            self._crashes = 0
        self._mover, self._blocked, self._stall_at = None, False, None
        self.counters["mover_deaths"] += 1
        for state in list(self._lenders.values()):
            state.attached, state.retry_at = False, None
            self._drop_queue(state, lambda job: True)
        for job in list(self._jobs):
            self._over(job, "its mover died")
        if not self._closed:
            log.warning("the mover process died; a new one is started")
            self._plan_restart()

    def tick(self, now: float) -> None:
        if self._restart_at is not None and self._restart_at <= now:
            if any(not state.over for state in self._lenders.values()):
                self._start_mover()
            else:
                self._restart_at = None
        if self._mover is not None:
            for state in self._lenders.values():
                if state.retry_at is not None and state.retry_at <= now:
                    self._attach(state)
        if self._blocked:
            self._pump()
        self._check_stall(now)

    def _check_stall(self, now: float) -> None:
        """A mover that does not move is no proof of anything; its death is, so it is killed and posts end clean."""
        owed = self._owed()
        if self._mover is None or owed is None:
            self._stall_at = None
            return
        if self._stall_at is None:
            self._stall_at = now + owed
        if now > self._stall_at + _OVERDUE:
            self._stall_at = now + _OVERDUE / 2
        elif now >= self._stall_at:
            log.error("the mover process has work and has not moved for %.1f s; it is killed", owed)
            self.counters["mover_stalls"] += 1
            self._stall_at = None
            self._mover.kill()

    def _owed(self) -> float | None:
        """Seconds within which the mover must say something; None: it owes nothing."""
        if self._jobs:
            return self._stall_seconds
        if any(not (state.attached or state.over) and state.retry_at is None for state in self._lenders.values()):
            return max(self._stall_seconds, wire.ATTACH_SECONDS + 2.0)
        return None

    def next_deadline(self) -> float | None:
        soonest = self._restart_at if self._stall_at is None else self._stall_at
        if self._restart_at is not None and soonest is not None:
            soonest = min(soonest, self._restart_at)
        for state in self._lenders.values():  # asked for with every post, so without a list of them
            if state.retry_at is not None and (soonest is None or state.retry_at < soonest):
                soonest = state.retry_at
        return soonest

    # ------------------------------------------------------------ posts

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        return self._post(peer, src_pages, dst_pages, grant, read=False)

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        return self._post(peer, src_pages, dst_pages, grant, read=True)

    def _post(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant, read: bool) -> Post:
        self.counters["posts"] += 1
        self._last_job += 1
        post = Post(self._last_job, peer)
        state = self._lenders.get(peer.number)
        assert self._arena is not None
        refusal: str | None
        try:
            src, dst = array("i", src_pages), array("i", dst_pages)  # as they go to the mover
            own, theirs = (dst, src) if read else (src, dst)
            refusal = self._not_now(read) or refusal_of(state, self._arena, own, theirs, grant, read)
        except OverflowError:
            refusal = "a page's number is beyond any pool"
        if refusal is not None or state is None:
            log.info("post %d to epoch %x refused, nothing was touched: %s", post.id, peer.epoch, refusal)
            self._end(post, Outcome.FAILED_CLEAN)
            return post
        if not src:
            self._end(post, Outcome.PLACED)
            return post
        starts = range(0, len(src), self._max_transfer_pages)
        total = Sum(post, len(starts))
        self._sums[post.id] = total
        state.open_posts += 1
        for start in starts:
            part = slice(start, start + self._max_transfer_pages)
            self._last_job += 1
            job = wire.Job(
                self._last_job,
                peer.number,
                grant.region,
                grant.generation,
                src[part].tobytes(),
                dst[part].tobytes(),
                read,
            )
            self._job_posts[job.id] = total
            state.queue.append(job)
        self._feed(state)
        return post

    def _not_now(self, read: bool) -> str | None:
        if read and not self._reads:
            return "this transport was not opened to read"
        if self._mover is None:
            return "the mover process is being started again"
        if len(self._sums) >= self._max_open_posts:
            return f"{self._max_open_posts} posts are open already"
        return None

    def fence(self, peer_epoch: int, generation: int) -> bool:
        """Ends what we read from that peer, by ending the mover: it attaches anew, and what was granted before is
        refused then. False: we do not read."""
        targets = [state for state in self._lenders.values() if state.peer.epoch == peer_epoch]
        older = any(not state.attached or state.generation <= generation for state in targets)
        if self._reads and older and self._mover is not None:
            self._mover.end()
        return self._reads

    def _pump(self) -> None:
        if self._mover is None:
            return
        if self._blocked:
            self._blocked = False
            self._mover.want_writable(False)
        for state in list(self._lenders.values()):
            self._feed(state)

    def _feed(self, state: Target) -> None:
        while state.queue and state.at_mover < JOBS_AT_MOVER and self._mover and not self._blocked:
            job = state.queue[0]
            if not self._mover.send(job):
                self._blocked = True
                self._mover.want_writable(True)
                return
            state.queue.popleft()
            total = self._job_posts.pop(job.id)
            total.started = True
            if not self._jobs:
                self._stall_at = time.monotonic() + self._stall_seconds
            self._jobs[job.id] = (total, state, len(job.src) // 4)
            state.at_mover += 1

    def _on_packet(self, packet: object) -> bool:
        """True: the mover has work still, so it may have said more."""
        self._stall_at = None  # it moves
        match packet:
            case wire.Placed(jobs=jobs):
                for job in jobs:
                    self._over(job, None)
            case wire.Dropped(job=job, reason=reason):
                self._over(job, reason)
            case wire.Attached(peer=number, generation=generation) if number in self._lenders:
                state = self._lenders[number]
                state.attached, state.generation, state.tries = True, generation, 0
            case wire.Lost(peer=number, reason=reason, final=final) if number in self._lenders:
                self._on_lost(self._lenders[number], reason, final)
        return bool(self._jobs)

    def _on_lost(self, state: Target, reason: str, final: bool) -> None:
        if state.over:
            return
        if state.attached or final:
            self.lost_peers.append(PeerLost(state.peer.epoch, state.generation, reason, final))
        state.attached = False
        if final:
            self._give_up(state)
        else:
            self._retry(state)

    def _over(self, job: int, reason: str | None) -> None:
        total, state, pages = self._jobs.pop(job)
        state.at_mover -= 1
        if reason is None:
            self.counters["placed_pages"] += pages
            self._crashes = 0  # a mover that works may be killed by fences as often as lenders see fit
        elif not total.failed:
            log.info("post %d to epoch %x failed: %s", total.post.id, state.peer.epoch, reason)
        self._count_down(total, state, failed=reason is not None)
        self._feed(state)

    def _count_down(self, total: Sum, state: Target, failed: bool) -> None:
        total.left -= 1
        if failed and not total.failed:
            total.failed = True
            self._drop_queue(state, lambda job: self._job_posts[job.id] is total)
        if total.left == 0 and total.post.id in self._sums:
            self._close(total, state)
            self._end(total.post, Outcome.FAILED_CLEAN if total.failed else Outcome.PLACED)

    def _drop_queue(self, state: Target, chosen: Callable[[wire.Job], bool]) -> None:
        """Jobs that never reached the mover are over at once."""
        dropped = [job for job in state.queue if chosen(job)]
        state.queue = deque(job for job in state.queue if not chosen(job))
        totals = [self._job_posts.pop(job.id) for job in dropped]
        for total in totals:
            total.failed = True
        for total in totals:
            self._count_down(total, state, failed=True)

    def try_cancel(self, post: Post) -> bool:
        total = self._sums.get(post.id)
        state = self._lenders.get(post.peer.number)
        if total is None or state is None or total.started:
            return False
        for job in [job for job in state.queue if self._job_posts[job.id] is total]:
            state.queue.remove(job)
            del self._job_posts[job.id]
        self._close(total, state)
        return True

    def open_posts(self, peer: Peer) -> int:
        state = self._lenders.get(peer.number)
        return state.open_posts if state is not None else 0

    def _close(self, total: Sum, state: Target) -> None:
        del self._sums[total.post.id]
        state.open_posts -= 1
        self._tidy(state)

    def _tidy(self, state: Target) -> None:
        if state.over and not state.open_posts:
            self._lenders.pop(state.peer.number, None)

    def _end(self, post: Post, outcome: Outcome) -> None:
        self.counters["failed_posts"] += outcome is not Outcome.PLACED
        self.ended.append((post, outcome))

    def close(self) -> None:
        self._closed = True
        if self._mover is not None:
            self._mover.end()
        self._lenders.clear()
