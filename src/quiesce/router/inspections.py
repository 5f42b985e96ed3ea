"""Asks every worker for its state at once, and waits a bounded time for the answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable

from quiesce.core.messages import Inspect, Inspected
from quiesce.router.registry import Worker


class Inspections:
    def __init__(self, send: Callable[[Worker, Inspect], bool]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Inspected]] = {}

    def answered(self, message: Inspected) -> None:
        future = self._waiting.get(message.seq)
        if future is not None and not future.done():
            future.set_result(message)

    async def ask(self, workers: Iterable[Worker], timeout: float, page: int | None) -> dict[str, Inspected | str]:
        """Worker name -> its answer, or why there is none."""
        answers: dict[str, Inspected | str] = {}
        asked: dict[str, tuple[int, asyncio.Future[Inspected]]] = {}
        for worker in workers:
            seq = secrets.randbits(63)
            if worker.up and self._send(worker, Inspect(seq, page)):
                asked[worker.name] = (seq, asyncio.get_running_loop().create_future())
                self._waiting[seq] = asked[worker.name][1]
            else:
                answers[worker.name] = "cannot be reached"
        try:
            if asked:
                await asyncio.wait([future for _, future in asked.values()], timeout=timeout)
        finally:
            for seq, _ in asked.values():
                del self._waiting[seq]
        for name, (_, future) in asked.items():
            answers[name] = future.result() if future.done() else f"did not answer within {timeout:g} s"
        return answers
