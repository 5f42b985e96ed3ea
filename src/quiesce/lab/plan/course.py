"""A whole cluster, one event at a time, in numbers of pages: nothing is tracked, everything is counted.

A request waits at its decode worker until the pool can hold it, is offered to its prefill worker, computed there one
prompt at a time while its pages leave, lands, and is answered. When it ends while its pages are offered they are
held: until the answer to ABORT comes, or for --hold-timeout and a fence, or until a worker restarts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from quiesce.lab.plan.case import Case, Course, Sizes
from quiesce.lab.plan.requests import NEVER, Requests
from quiesce.roles.timers import REPEAT_FIRST, REPEAT_MOST

WAITING, QUEUED, COMPUTING, SENDING, LANDING, DECODING, OVER = range(7)
DOWN = 1 << 40  # load of a worker that takes nothing
SAMPLES = 400  # points of a curve


class Least:
    """The worker with the fewest requests."""

    def __init__(self, count: int) -> None:
        self.load = [0] * count
        self._heap = [(0, worker) for worker in range(count)]

    def add(self, worker: int, change: int) -> None:
        self.load[worker] += change
        heappush(self._heap, (self.load[worker], worker))

    def pick(self) -> int:
        heap, load = self._heap, self.load
        while heap[0][0] != load[heap[0][1]]:
            heappop(heap)
        return heap[0][1]


class Simulation:
    def __init__(self, requests: Requests, sizes: Sizes, case: Case) -> None:
        self.requests, self.sizes, self.case = requests, sizes, case
        count, size = len(requests), sizes.page_size
        self.now = 0.0
        self.prompt_pages: list[int] = np.ceil(requests.prompt / size).astype(int).tolist()
        self.promise: list[int] = np.ceil((requests.prompt + requests.answer) / size).astype(int).tolist()
        self.compute: list[float] = (requests.prompt / sizes.prefill_speed).tolist()
        self.decode: list[float] = (requests.answer / sizes.decode_speed).tolist()
        self.arrival: list[float] = requests.arrival.tolist()
        self.state = [WAITING] * count
        self.at_prefill, self.at_decode = [0] * count, [0] * count
        self.began, self.sent_at = [0.0] * count, [0.0] * count
        self.has_source = [False] * count
        self.held_since, self.is_retained = [NEVER] * count, [False] * count
        self.delay, self.first = [math.nan] * count, [math.nan] * count
        # prefill workers
        self.prefill_queue: list[deque[int]] = [deque() for _ in range(sizes.prefills)]
        self.busy = [-1] * sizes.prefills
        self.source_free = [sizes.prefill_pages] * sizes.prefills
        self.nic_free = [0.0] * sizes.prefills
        self.offered: list[set[int]] = [set() for _ in range(sizes.prefills)]  # open hand-offs
        self.held_by: list[set[int]] = [set() for _ in range(sizes.prefills)]
        self.prefills = Least(sizes.prefills)
        # decode workers
        self.decode_queue: list[deque[int]] = [deque() for _ in range(sizes.decodes)]
        self.active: list[set[int]] = [set() for _ in range(sizes.decodes)]
        self.running, self.promised = [0] * sizes.decodes, [0] * sizes.decodes
        self.held, self.retained = [0] * sizes.decodes, [0] * sizes.decodes
        self.held_at: list[set[int]] = [set() for _ in range(sizes.decodes)]
        self.down = [False] * sizes.decodes
        self.decodes = Least(sizes.decodes)
        self.held_total = self.retained_total = self.promised_total = self.waiting = self.peak = 0
        self.course = Course(case, sizes, requests.seconds)
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._pushed = 0

    # ------------------------------------------------------------ the loop

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Course:
        heap, course = self._heap, self.course
        step = max(self.requests.seconds / SAMPLES, 1e-9)
        sample = 0.0
        for number, at in enumerate(self.arrival):
            while heap and heap[0][0] <= at:
                self._next()
            while sample <= at:
                now = (sample, self.peak, self.retained_total, self.promised_total, self.waiting)
                course.samples.append(now)
                self.peak = self.held_total
                sample += step
            self.now = at
            self._arrive(number)
            if number % 2048 == 0:
                progress(number)
        while heap:
            self._next()
        for held in self.held_at:
            course.holds += [(self.held_since[i], self.prompt_pages[i], NEVER) for i in sorted(held)]
        course.delay, course.first = np.array(self.delay), np.array(self.first)
        return course

    def _next(self) -> None:
        self.now, _, what, about = heappop(self._heap)
        self.course.events += 1
        what(about)

    def _later(self, seconds: float, what: Callable[[int], None], about: int) -> None:
        self._pushed += 1
        heappush(self._heap, (self.now + seconds, self._pushed, what, about))

    # ------------------------------------------------------------ the good way

    def _arrive(self, i: int) -> None:
        sizes, requests = self.sizes, self.requests
        if self.promise[i] > sizes.decode_pages or self.prompt_pages[i] > sizes.prefill_pages:
            self.state[i] = OVER
            self.course.refused += 1
            return
        d, p = self.decodes.pick(), self.prefills.pick()
        self.at_decode[i], self.at_prefill[i] = d, p
        self.decodes.add(d, 1)
        self.prefills.add(p, 1)
        self.active[d].add(i)
        self.decode_queue[d].append(i)
        self.waiting += 1
        leaves = float(requests.leaves[i])
        if leaves < NEVER:
            self._later(leaves - self.now, self._leave, i)
        storm = self.case.storm
        if storm is not None and requests.storm[i] < storm[2]:
            when = storm[0] + float(requests.storm_place[i]) * (storm[1] - storm[0])
            if when >= self.now:
                self._later(when - self.now, self._leave, i)
        self._admit(d)

    def _admit(self, d: int) -> None:
        """In order of arrival: who waits for pages lets nobody pass."""
        queue, pool = self.decode_queue[d], self.sizes.decode_pages
        while queue and not self.down[d]:
            i = queue[0]
            if self.state[i] == WAITING:
                need = self.promise[i]
                full = self.running[d] >= self.sizes.max_running
                if full or self.promised[d] + self.held[d] + need > pool:
                    return
                self.promised[d] += need
                self.promised_total += need
                self.running[d] += 1
                self.waiting -= 1
                self.delay[i] = self.now - self.arrival[i]
                self.state[i] = QUEUED
                self.offered[self.at_prefill[i]].add(i)
                self._later(self.case.ack / 2, self._offer_arrives, i)
            queue.popleft()

    def _offer_arrives(self, i: int) -> None:
        if self.state[i] == QUEUED:
            self.prefill_queue[self.at_prefill[i]].append(i)
            self._compute(self.at_prefill[i])

    def _compute(self, p: int) -> None:
        queue = self.prefill_queue[p]
        while queue and self.busy[p] < 0:
            i = queue[0]
            if self.state[i] == QUEUED:
                if self.source_free[p] < self.prompt_pages[i]:
                    return
                self.source_free[p] -= self.prompt_pages[i]
                self.has_source[i] = True
                self.busy[p], self.began[i], self.state[i] = i, self.now, COMPUTING
                self._later(self.compute[i], self._computed, i)
            queue.popleft()

    def _computed(self, i: int) -> None:
        p = self.at_prefill[i]
        if self.busy[p] != i:
            return
        self.busy[p] = -1
        self.state[i] = SENDING
        pages, each = self.prompt_pages[i], self.sizes.page_seconds
        last_chunk = min(pages, self.sizes.chunk_pages) * each
        self.sent_at[i] = self.nic_free[p] = max(self._sends_from(i) + pages * each, self.now + last_chunk)
        self._later(self.sent_at[i] - self.now, self._sent, i)
        self._compute(p)

    def _sends_from(self, i: int) -> float:
        """Its first chunk leaves when it is computed and what was posted before is through."""
        chunks = max(1.0, self.prompt_pages[i] / self.sizes.chunk_pages)
        return max(self.nic_free[self.at_prefill[i]], self.began[i] + self.compute[i] / chunks)

    def _sent(self, i: int) -> None:
        if self.state[i] != SENDING:
            return
        self.state[i] = LANDING
        self.prefills.add(self.at_prefill[i], -1)
        self.sent_at[i] = self.now
        self._later(self.case.ack / 2, self._landed, i)
        self._source_back(i)

    def _source_back(self, i: int) -> None:
        if self.has_source[i]:
            p = self.at_prefill[i]
            self.has_source[i] = False
            self.source_free[p] += self.prompt_pages[i]
            self._compute(p)

    def _landed(self, i: int) -> None:
        if self.state[i] == LANDING:
            self.state[i] = DECODING
            self.offered[self.at_prefill[i]].discard(i)
            self.first[i] = self.now - self.arrival[i]
            self._later(self.decode[i], self._answered, i)

    def _answered(self, i: int) -> None:
        if self.state[i] == DECODING:
            self._over(i)
            self._admit(self.at_decode[i])

    def _over(self, i: int) -> None:
        """It ends at decode, in whatever state; what was offered of it is not looked at here."""
        d = self.at_decode[i]
        if self.state[i] == WAITING:
            self.waiting -= 1
        else:
            self.promised[d] -= self.promise[i]
            self.promised_total -= self.promise[i]
            self.running[d] -= 1
        self.state[i] = OVER
        self.active[d].discard(i)
        self.offered[self.at_prefill[i]].discard(i)
        self.decodes.add(d, -1)

    # ------------------------------------------------------------ clients leave

    def _leave(self, i: int) -> None:
        was = self.state[i]
        if was == OVER:
            return
        under_way = self._stop_prefill(i)
        self._over(i)
        if was == LANDING and self.case.holds:  # DONE is on its way, and is a proof as good as an answer
            self._hold(i, self.sent_at[i] + self.case.ack / 2 - self.now)
        elif QUEUED <= was <= SENDING and self.case.holds:
            self._hold(i, self._answer(i, under_way))
        self._admit(self.at_decode[i])

    def _stop_prefill(self, i: int) -> float:
        """The router cancels both legs. Returns the seconds until what was posted is through."""
        was, p = self.state[i], self.at_prefill[i]
        if was > SENDING:
            return 0.0
        self.prefills.add(p, -1)
        if was < COMPUTING:
            return 0.0
        under_way = self._under_way(i)
        if was == COMPUTING:
            self.busy[p] = -1
            self.nic_free[p] = max(self.nic_free[p], self.now + under_way)
        elif self.nic_free[p] == self.sent_at[i]:
            self.nic_free[p] = self.now + under_way
        self._later(under_way, self._source_back, i)
        self._compute(p)
        return under_way

    def _under_way(self, i: int) -> float:
        """Whole chunks are posted, as soon as they are computed and the window has room."""
        sizes = self.sizes
        chunk = min(self.prompt_pages[i], sizes.chunk_pages)
        writing, through = chunk * sizes.page_seconds, self.sent_at[i]
        if self.state[i] == COMPUTING:
            computing = self.compute[i] * chunk / self.prompt_pages[i]
            chunks = int((self.now - self.began[i]) / computing) if computing else 0
            if not chunks:
                return 0.0
            through = max(self.began[i] + chunks * computing + writing, self._sends_from(i) + chunks * writing)
        return min(max(0.0, through - self.now), sizes.window * writing)

    def _answer(self, i: int, under_way: float) -> float:
        """Seconds until ABORT is answered."""
        case = self.case
        answered = case.ack + self._repeats(i) + under_way
        if case.dead is not None and case.dead[0] <= self.now < case.dead[1]:
            asked_again = REPEAT_MOST * float(self.requests.luck[i])  # ABORT is repeated at its slowest by then
            answered += case.dead[1] - self.now + asked_again
        return answered

    def _hold(self, i: int, answered: float) -> None:
        case, d = self.case, self.at_decode[i]
        self.held_since[i] = self.now
        self.held_at[d].add(i)
        self.held_by[self.at_prefill[i]].add(i)
        self._held(d, self.prompt_pages[i])
        if case.fence is not None and answered >= case.hold_timeout + case.fence:
            self._later(case.hold_timeout + case.fence, self._fenced, i)
        else:
            if answered > case.hold_timeout:
                self._later(case.hold_timeout, self._retain, i)
            if answered < NEVER:
                self._later(answered, self._proven, i)

    def _fenced(self, i: int) -> None:
        p = self.at_prefill[i]
        if self.held_since[i] == NEVER or not self.case.disrupts:
            self._proven(i)
            return
        for other in sorted(self.held_by[p]):
            self._proven(other)
        for other in sorted(self.offered[p]):
            self.course.cut += 1
            self._stop_prefill(other)
            self._over(other)
            self._admit(self.at_decode[other])

    def _repeats(self, i: int) -> float:
        """How much later the answer comes because so many ABORTs or answers were lost."""
        if not self.case.loss:
            return 0.0
        lost = int(math.log(max(float(self.requests.luck[i]), 1e-300)) / math.log(self.case.loss))
        return sum(min(REPEAT_MOST, REPEAT_FIRST * float(1 << min(n, 16))) for n in range(min(lost, 100)))

    def _held(self, d: int, change: int) -> None:
        self.held[d] += change
        self.held_total += change
        self.peak = max(self.peak, self.held_total)
        self.course.times.append(self.now)
        self.course.held.append(self.held_total)
        self.course.most_share = max(self.course.most_share, self.held[d] / self.sizes.decode_pages)

    def _proven(self, i: int) -> None:
        if self.held_since[i] < NEVER:
            self._hold_ends(i)
            self._admit(self.at_decode[i])

    def _hold_ends(self, i: int) -> None:
        d, pages, since = self.at_decode[i], self.prompt_pages[i], self.held_since[i]
        self.course.holds.append((since, pages, self.now - since))
        self.held_since[i] = NEVER
        self.held_at[d].discard(i)
        self.held_by[self.at_prefill[i]].discard(i)
        if self.is_retained[i]:
            self.is_retained[i] = False
            self._retained(d, -pages)
        self._held(d, -pages)

    # ------------------------------------------------------------ no proof is to be had

    def _retain(self, i: int) -> None:
        if self.held_since[i] == NEVER:
            return
        d, sizes = self.at_decode[i], self.sizes
        self.is_retained[i] = True
        self._retained(d, self.prompt_pages[i])
        if self.retained[d] > sizes.max_retained * sizes.decode_pages and not self.down[d]:
            self.down[d] = True
            self.course.restarts += 1
            self.decodes.add(d, DOWN)
            self._later(sizes.drain_timeout, self._restart, d)

    def _retained(self, d: int, change: int) -> None:
        self.retained[d] += change
        self.retained_total += change

    def _restart(self, d: int) -> None:
        """New memory: nothing of the old process reaches it. Who did not finish in time is cut."""
        self.course.cut += len(self.active[d])
        for i in sorted(self.active[d]):
            self._stop_prefill(i)
            self._over(i)
        for i in sorted(self.held_at[d]):
            self._hold_ends(i)
        self.decode_queue[d].clear()
        self._later(self.sizes.restart, self._up, d)

    def _up(self, d: int) -> None:
        self.down[d] = False
        self.decodes.add(d, -DOWN)
        self._admit(d)
