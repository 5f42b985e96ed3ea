"""What threads tell the thread that owns a transport: a queue that makes the transport's descriptor readable."""

from __future__ import annotations

import contextlib
import os
import threading
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
        self._lock = threading.Lock()  # a number that was closed may be another file's already
        watch.add(self._event, self._run)

    def put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """A thread may be in the middle of a `put` still: what it puts from now on is heard by nobody."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._watch.remove(self._event)
                os.close(self._event)
