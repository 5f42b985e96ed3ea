"""What threads tell the thread that owns a transport: a queue that makes the transport's descriptor readable."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from quiesce.transfer.watch import Watch


class Inbox:
    """`put` from any thread, a callable each; the owner runs them inside its turn, in order."""

    def __init__(self, watch: Watch) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch = watch
        self._closed = False
        watch.add(self._event, self._run)

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Once no thread is left that may put."""
        if not self._closed:
            self._closed = True
            self._watch.remove(self._event)
            os.close(self._event)
