"""One child process in the supervisor's event loop: it dies with us, its output is read, its end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REAP_INTERVAL = 0.01  # seconds; what was killed is gone within a few of them
LAST_LINES = 12
LONGEST_LINE = 16 << 10  # bytes; longer ones are broken
READ_SIZE = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans(adopt: bool) -> None:
    """What a dead child had started becomes our child, so that its end can be waited for and not only hoped for."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _die_with_parent(parent: int) -> None:
    """In the child, before exec: the kernel kills it when the supervisor's main thread ends, however."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


class Process:
    """Starts at once, as the leader of a new process group. Make it on the main thread, inside the loop.

    `on_line` gets each line of stdout and stderr; `on_exit` the exit code (negative: the signal), once, when
    the process is reaped and nothing of its group is left. Raises OSError when it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._partial = b""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._code: int | None = None
        self._output, theirs = os.pipe()
        parent = os.getpid()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is ours to pass on, in order
                preexec_fn=lambda: _die_with_parent(parent),  # noqa: PLW1509  (no Python thread runs beside the fork)
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._pidfd, self._ended)

    def signal(self, number: int) -> None:
        """To the process itself; it passes on what its own children must know."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """The whole group, at once."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.kill()  # what it left behind; not reaped yet, so the group's number is still its own
        self._code = self._popen.wait()
        os.close(self._pidfd)
        self._reap_group(self._code)

    def _reap_group(self, code: int) -> None:
        """Until nothing of the group is left: a mover that is killed may still be copying for a moment."""
        try:
            while os.waitpid(-self.pid, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            self._read()
            self._close_output()
            self._on_exit(code)
        else:
            self._loop.call_later(REAP_INTERVAL, self._reap_group, code)

    def _read(self) -> None:
        for _ in range(8):  # then the other children's turn
            if self._output < 0:
                return
            try:
                chunk = os.read(self._output, READ_SIZE)
            except BlockingIOError:
                return
            if not chunk:
                self._close_output()
                return
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            if len(self._partial) > LONGEST_LINE:
                lines.append(self._partial)
                self._partial = b""
            for line in lines:
                self._emit(line)

    def _close_output(self) -> None:
        if self._output < 0:
            return
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._output = -1
        if self._partial:
            self._emit(self._partial)
            self._partial = b""

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._on_line(text)
