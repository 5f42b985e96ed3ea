"""Grammars are compiled beside the loop and the engine: a leg is let in at once, its tokens wait for its grammar."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

from quiesce.engine.grammar import Grammars, Progress


@dataclass(eq=False)
class Compiled:
    """One answer's grammar. It outlives a retraction: the answer's tokens say where it goes on."""

    text: str
    progress: Progress | None = None

    @property
    def ready(self) -> bool:
        return self.progress is not None


class Compiler:
    """`fileno()` becomes readable when something was compiled. As many wait as there are legs."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._wanted: SimpleQueue[tuple[str, Compiled] | None] = SimpleQueue()
        self._ended: deque[tuple[str, str | None]] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._signal

    def begin(self, rid: str, grammar: str) -> Compiled:
        compiled = Compiled(grammar)
        self._wanted.put((rid, compiled))
        return compiled

    def failures(self) -> list[tuple[str, str]]:
        """(rid, why) of what could not be compiled since the last call."""
        try:
            os.eventfd_read(self._signal)
        except BlockingIOError:
            return []
        found = []
        while self._ended:
            rid, error = self._ended.popleft()
            if error is not None:
                found.append((rid, error))
        return found

    def stop(self) -> None:
        self._wanted.put(None)
        self._thread.join()
        os.close(self._signal)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            rid, compiled = wanted
            error = None
            try:
                compiled.progress = self._grammars.begin(compiled.text)
            except Exception as fault:  # whatever it is, it ends this answer alone
                error = str(fault)
            self._ended.append((rid, error))
            os.eventfd_write(self._signal, 1)
