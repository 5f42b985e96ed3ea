"""A worker's process, forked from one that has imported everything: the imports cost seconds of CPU time each.

The server of the forks starts with the first worker and ends with whoever started it. It computes nothing, so it has
no thread of its own; that of numpy's OpenBLAS is ended by OpenBLAS before a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from quiesce.lab import worker

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class WorkerProcess:
    """Runs `spec`; what it writes to stderr is appended to `log`."""

    def __init__(self, spec: Path, log: Path) -> None:
        heard, self._word = _FORKS.Pipe(duplex=False)
        arguments = (str(spec), str(log), dict(os.environ), heard)
        self._process = _FORKS.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        heard.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def let_go(self) -> None:
        """One whose spec says `held` goes on."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: whoever waits for it is told
            self._word.send_bytes(b"go")

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} has not ended within {seconds} s")
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kills it if it lives."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._word.close()


def _run(spec: str, log: str, environment: dict[str, str], heard: Connection) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    raise SystemExit(worker.main(spec, lambda: _word(heard)))


def _word(heard: Connection) -> bool:
    try:
        return heard.recv_bytes() == b"go"
    except EOFError:  # whoever held it is gone
        return False
