"""Test requests that ask one worker whether it still works: through its machine, its pages and its engine, and back.

A worker that has work and does not move may be stuck or may only wait for its peer; a probe tells. `/health?probe=1`
sends one to every worker. At most one is out at a worker: whoever asks meanwhile gets the same answer, so that asking
often costs nobody a place.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable

from quiesce.core.messages import Ended, Sampling, Start
from quiesce.router.registry import Worker

PREFIX = "probe-"
PROMPT = (0,)
TOKENS = 2  # the first comes with the hand-off, the second from the engine
FIRST = -(1 << 30)  # priority: before everything else
STILL = 2.0  # seconds without progress after which a worker with work is probed, and again after each answer
DEADLINE_MS = 60_000


class Probes:
    def __init__(self, epoch: int, send: Callable[[Worker, Start], bool], now: Callable[[], float]) -> None:
        self._epoch = epoch
        self._send = send
        self._now = now
        self._waiting: dict[str, asyncio.Future[float | str] | None] = {}  # rid -> whoever asked

    def sweep(self, workers: Iterable[Worker]) -> None:
        """Sends one to each worker that has work, or failed its last one, and stands still."""
        for worker in workers:
            since = worker.probe_answered if worker.probe_error else max(worker.moved, worker.probe_answered)
            suspect = worker.up and (worker.busy or worker.probe_error) and not worker.probes
            if suspect and self._now() - since > STILL:
                self.send(worker)

    def send(self, worker: Worker, waits: asyncio.Future[float | str] | None = None) -> bool:
        rid = f"{PREFIX}{secrets.token_hex(8)}"
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        start = Start(
            rid=rid,
            router_epoch=self._epoch,
            room=secrets.randbits(63),
            token_ids=PROMPT,
            sampling=sampling,
            deadline_ms=DEADLINE_MS,
            priority=FIRST,
            probe=True,
        )
        if not self._send(worker, start):
            return False
        worker.probes[rid] = self._now()
        self._waiting[rid] = waits
        return True

    def ended(self, worker: Worker, ended: Ended) -> None:
        sent = worker.probes.pop(ended.rid, None)
        if sent is None:
            return
        worker.probe_answered = self._now()
        passed = ended.outcome in ("stop", "length", "handed_over")
        if passed:
            worker.moved = self._now()
        if ended.outcome != "refused":  # then it has no room for a test, which is no fault
            worker.probe_error = "" if passed else f"it failed a test request: {ended.reason}"
        waits = self._waiting.pop(ended.rid, None)
        if waits is not None and not waits.done():
            waits.set_result(self._now() - sent if passed else ended.reason or ended.outcome)

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        for rid in worker.probes:
            waits = self._waiting.pop(rid, None)
            if waits is not None and not waits.done():
                waits.set_result("it is gone")
        worker.probes.clear()

    def _asked(self, worker: Worker) -> asyncio.Future[float | str] | None:
        """What the test request that is out at a worker, or is sent now, will have found; None: it cannot be sent."""
        out = next(iter(worker.probes), None)
        future = None if out is None else self._waiting.get(out)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if out is not None:
                self._waiting[out] = future
            elif not (worker.up and self.send(worker, future)):
                return None
        return future

    async def all(self, workers: Iterable[Worker], timeout: float) -> dict[str, float | str]:
        """Worker name -> seconds that its probe took, or why it did not pass."""
        answers: dict[str, float | str] = {}
        asked: dict[str, asyncio.Future[float | str]] = {}
        for worker in workers:
            future = self._asked(worker)
            if future is None:
                answers[worker.name] = "cannot be reached"
            else:
                asked[worker.name] = future
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout)
        for name, future in asked.items():
            late = f"its test request has not come back for {timeout:g} s"
            answers[name] = future.result() if future.done() else late
        return answers
