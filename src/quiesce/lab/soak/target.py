"""What is soaked: any OpenAI-compatible server by its URL, or a cluster of our own that may be broken on purpose."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from quiesce.lab.idle import not_idle

START_SECONDS = 180.0
WORDS = {"mover": b"quiesce.transfer.mover", "router": b"router", "prefill": b"prefill", "decode": b"decode"}
READY = re.compile(rb"at (http://\S+) .*ready after")


@dataclass
class Target:
    """A server. `ledger`: it shows `/debug/ledger`, so that its pages can be counted."""

    url: str
    key: str = ""
    ledger: bool = False
    supervisor: int | None = None  # process id of a cluster of our own

    def pids(self, role: str) -> list[int]:
        """Processes of our own cluster: router, prefill, decode or mover."""
        return [] if self.supervisor is None else _below(self.supervisor, WORDS[role])

    async def look(self, client: httpx2.AsyncClient) -> dict[str, Any]:
        """Each worker's state by its name; empty for servers of others."""
        if not self.ledger:
            return {}
        answer = await client.get("/debug/ledger")
        answer.raise_for_status()
        return dict(answer.json())

    async def unrest(self, client: httpx2.AsyncClient) -> list[str]:
        """Why it is not idle; empty when it is, and for servers of others."""
        try:
            states = await self.look(client)
        except (httpx2.HTTPError, ValueError) as error:
            return [f"/debug/ledger: {error}"]
        return [
            f"{name}: {line}"
            for name, state in states.items()
            for line in (not_idle(state) if "pages" in state else [str(state)])
        ]


@dataclass
class OwnCluster:
    """A context manager: `quiesce serve` with workers of the lab, in a process group of its own."""

    model: str
    options: Sequence[str]
    chaos: bool = True
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=lambda: Path(tempfile.mkstemp(prefix="quiesce-soak-", suffix=".log")[1]))

    def __enter__(self) -> Target:
        words = ["-m", "quiesce.lab.soak.serve"] if self.chaos else ["-m", "quiesce", "serve"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words, self.model, "--port", "0", *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        limit = time.monotonic() + START_SECONDS
        while (ready := READY.search(self.log.read_bytes())) is None:
            if self.process.poll() is not None or time.monotonic() > limit:
                self.__exit__()
                raise RuntimeError(f"the cluster did not start; its log is {self.log}")
            time.sleep(0.1)
        return Target(ready.group(1).decode().rstrip("/"), ledger=True, supervisor=self.process.pid)

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _below(pid: int, word: bytes) -> list[int]:
    """Living descendants of a process with this word on their command line."""
    parents: dict[int, int] = {}
    words: dict[int, list[bytes]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.name)], words[int(entry.name)] = int(fields[1]), line
    below, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - below
        below |= fresh
    return sorted(child for child in below if word in words[child])
