"""One engine in one process. Answers one JSON line for each JSON line it is sent; idle, it sleeps in a read.

Run by bench.pinned in the engine's own environment, of which it wants nothing but the engine:

    python -m bench.offline MODULE MODEL DTYPE [OPTION=VALUE ...]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Work:
    """One window. `kind` as bench.cases.Case has it."""

    kind: str
    prompts: list[list[int]]
    steps: int


class Subject(Protocol):
    """An engine. `window` returns each request's tokens, so that all can be seen to have done the same work."""

    def begin(self, work: Work) -> None:
        """Everything that is not timed: a decode window's prompts get their keys and values here."""

    def window(self, work: Work) -> list[list[int]]:
        """The timed part."""


def serve(module: str, model: str, dtype: str, options: dict[str, str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    begun = time.perf_counter()
    subject: Subject = importlib.import_module(module).open_subject(model, dtype, **options)
    print(json.dumps({"loaded": time.perf_counter() - begun}), file=answers)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        work = Work(**request)
        subject.begin(work)
        print(json.dumps({"begun": True}), file=answers)
        sys.stdin.readline()  # go
        wall = time.perf_counter()
        tokens = subject.window(work)
        print(json.dumps({"wall": time.perf_counter() - wall, "tokens": tokens}), file=answers)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    serve(*sys.argv[1:4], dict(option.split("=", 1) for option in sys.argv[4:]))
