"""What a person sees of a running cluster: one line of each process at a time, with its name in front."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TextIO

EXIT_RETAINED = 75


class Console:
    """Writes to `stream` (stderr). `names` only sets the width of the first column."""

    def __init__(self, names: Sequence[str] = (), stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._width = max([len("serve"), *map(len, names)])

    def line(self, name: str, text: str) -> None:
        try:
            print(f"{name:<{self._width}} | {text}", file=self._stream, flush=True)
        except OSError:  # nobody reads any more; serving matters more than talking
            return

    def say(self, text: str) -> None:
        self.line("serve", text)

    def quote(self, text: str, last_lines: Sequence[str]) -> None:
        """What happened, with the last words of the process that it happened to."""
        self.say(text)
        for line in last_lines:
            self.line("serve", f"    {line}")


def exit_words(code: int) -> str:
    """`prefill-0 ` + this says how a process ended."""
    if code == EXIT_RETAINED:
        return "restarts because too many of its pages were retained without proof"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
