"""What is seen of a running cluster: one line of each process at a time, with its name in front, or as JSON."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import msgspec

from quiesce.ops.logs import json_line
from quiesce.roles.settings import LogFormat

EXIT_RETAINED = 75
SELF = "serve"


class Console:
    """Writes to `stream` (stderr). `names` only sets the width of the first column.

    Under `json` every line is a JSON object that names its process; what a process said in other words is wrapped.
    """

    def __init__(self, names: Sequence[str] = (), stream: TextIO | None = None, form: LogFormat = "text") -> None:
        self._stream = stream or sys.stderr
        self._width = max([len(SELF), *map(len, names)])
        self._json = form == "json"

    def line(self, name: str, text: str) -> None:
        shown = _as_json(name, text) if self._json else f"{name:<{self._width}} | {text}"
        try:
            print(shown, file=self._stream, flush=True)
        except OSError:  # nobody reads any more; serving matters more than talking
            return

    def say(self, text: str) -> None:
        self.line(SELF, text)

    def quote(self, text: str, last_lines: Sequence[str]) -> None:
        """What happened, with the last words of the process that it happened to."""
        self.say(text)
        for line in last_lines:
            self.line(SELF, f"    {line}")


def _as_json(name: str, text: str) -> str:
    if text.startswith("{"):
        try:
            if isinstance(msgspec.json.decode(text), dict):
                return text
        except msgspec.DecodeError:
            pass  # it only looked like it
    return json_line(name, text, time.time(), level="info")


def exit_words(code: int) -> str:
    """`prefill-0 ` + this says how a process ended."""
    if code == EXIT_RETAINED:
        return "restarts because it keeps what only a new process gives back; its log says what"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
