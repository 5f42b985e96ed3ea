"""`quiesce serve` as a user meets it: from the command to the first answer, then one client's latencies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from bench.cases import TEXT
from bench.report import Spread, spread

DEADLINE = 120.0  # seconds to the first answer
DRAIN = 30.0
PAUSE = 0.05  # between knocks at a port that is not open yet
ANSWER = 64  # tokens
WAYS: dict[str, list[str]] = {"prefill and decode": [], "colocated": ["--colocated"]}


@dataclass(frozen=True)
class Timed:
    """Milliseconds: to the first token, and for each further one."""

    ttft: float
    tpot: float


class Serve:
    """`quiesce serve MODEL` with `flags` on a free port, in its own process group; ended with Ctrl-C."""

    def __init__(self, model: str, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._model, self._log = model, _log()
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0)
        command = [str(Path(sys.executable).with_name("quiesce")), "serve", model, "--port", str(port), *flags]
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )

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

    def stream(self, number: int) -> Timed:
        """One answer of ANSWER tokens to a prompt that no earlier request shared."""
        body = self._chat(f"{number}. {TEXT} Tell me more about the keeper.", ANSWER)
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        begun, first, last, tokens = time.perf_counter(), 0.0, 0.0, 0
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"quiesce serve answered {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("error"):
                    raise RuntimeError(f"quiesce serve failed in the middle of an answer: {event['error']}")
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if tokens < 2:
            raise RuntimeError(f"quiesce serve streamed {tokens} tokens; its usage says so, {ANSWER} were asked for")
        return Timed((first - begun) * 1e3, (last - first) * 1e3 / (tokens - 1))

    def _chat(self, text: str, tokens: int) -> dict[str, object]:
        messages = [{"role": "user", "content": text}]
        return {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0}

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]


def first_answers(model: str, starts: int) -> Spread:
    """Seconds to the first answer over `starts` whole starts and ends."""
    seconds = []
    for _ in range(starts):
        with Serve(model, []) as serve:
            seconds.append(serve.first_answer())
    return spread(seconds)


def latencies(model: str, requests: int) -> dict[str, dict[str, Spread]]:
    """For each way of serving: one client, one request after the other, the first not counted."""
    found = {}
    for way, flags in WAYS.items():
        with Serve(model, flags) as serve:
            serve.first_answer()
            serve.stream(0)
            timed = [serve.stream(number) for number in range(1, requests + 1)]
        found[way] = {"TTFT ms": spread([t.ttft for t in timed]), "TPOT ms": spread([t.tpot for t in timed])}
    return found


def _log() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
