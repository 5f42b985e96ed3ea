"""One epoll set with a wake-up flag and an alarm, so that a transport is one readable descriptor outside."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


def has_exited(pidfd: int) -> bool:
    """Whether the process behind a pidfd is dead: no thread of it runs any more."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class Watch:
    """Calls a handler for each ready descriptor. Handlers never block and must bear a spurious call."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._raised = False
        self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._due: float | None = None
        self._epoll.register(self._flag, select.EPOLLIN)
        self._epoll.register(self._timer, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def want_writable(self, fd: int, wanted: bool) -> None:
        if fd in self._handlers:
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def turn(self, timeout: float = 0.0) -> None:
        """Handle what is ready now, 64 descriptors at most."""
        for fd, _ in self._epoll.poll(timeout, 64):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def flag(self, raised: bool) -> None:
        """Keep `fileno()` readable while results wait to be fetched."""
        if raised and not self._raised:
            os.eventfd_write(self._flag, 1)
        elif self._raised and not raised:
            os.eventfd_read(self._flag)
        self._raised = raised

    def alarm(self, due: float | None) -> None:
        """Make `fileno()` readable at `due` (time.monotonic() seconds), until the next call; None: nothing is due.
        An alarm that is to come earlier stays and wakes once for nothing: deadlines move with every post, and setting
        the timer anew each time would cost more than the post."""
        if self._due is not None and (due is None or due >= self._due) and self._due > time.monotonic():
            return
        if due == self._due is None:
            return
        self._due = due
        spec = _Itimerspec()
        if due is not None:
            nanoseconds = max(1, int(due * 1e9))
            spec.value = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
        if _libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        if not self._epoll.closed:
            self._handlers.clear()
            self._epoll.close()
            os.close(self._flag)
            os.close(self._timer)
