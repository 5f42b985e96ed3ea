"""`quiesce serve` as a user meets it: from the command to the first answer, and the memory its idle workers take."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO

import httpx

from bench.machine import gib_of, workers_of
from bench.report import Spread, spread

DEADLINE = 120.0  # seconds to the first answer
DRAIN = 30.0
PAUSE = 0.05  # between knocks at a port that is not open yet


class Serve:
    """`quiesce serve MODEL` with `flags` on a free port, in its own process group; ended with Ctrl-C."""

    def __init__(self, model: str, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._model, self._log = model, log_file()
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30.0)
        command = [sys.executable, "-m", "quiesce", "serve", model, "--port", str(self.port), *flags]
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(DRAIN)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def first_answer(self) -> float:
        """Seconds from the start of the command to the end of a short chat answer."""
        while time.perf_counter() - self._begun < DEADLINE:
            if self._process.poll() is not None:
                raise RuntimeError(f"quiesce serve ended with {self._process.returncode}:\n{self._said()}")
            try:
                response = self._client.post("/v1/chat/completions", json=self._chat("What is a lighthouse?", 16))
            except httpx.TransportError:
                time.sleep(PAUSE)
                continue
            if response.status_code == 200:
                if response.json()["choices"][0]["message"]["content"]:
                    return time.perf_counter() - self._begun
                raise RuntimeError(f"quiesce serve gave an empty answer: {response.text}")
            if response.status_code != 503:  # 503: no worker yet
                raise RuntimeError(f"quiesce serve answered {response.status_code}: {response.text}")
            time.sleep(PAUSE)
        raise RuntimeError(f"quiesce serve gave no answer within {DEADLINE:.0f} s:\n{self._said()}")

    def _chat(self, text: str, tokens: int) -> dict[str, object]:
        messages = [{"role": "user", "content": text}]
        return {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0}

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]


def first_answers(model: str, starts: int) -> tuple[Spread, dict[str, float]]:
    """Over `starts` whole starts and ends: seconds to the first answer; of the last, GiB of each idle worker."""
    seconds, idle = [], {}
    for _ in range(starts):
        with Serve(model, []) as serve:
            seconds.append(serve.first_answer())
            idle = {role: gib_of(pid) for role, pid in workers_of(serve.pid).items()}
    return spread(seconds), idle


def log_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
