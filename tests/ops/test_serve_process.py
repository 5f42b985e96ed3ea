"""The real `quiesce serve` with a tiny model: starts, answers, survives kills, leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cluster import alive_in_group

from tiny_model import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
START = 170.0  # seconds, on a busy machine


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str
    log: Path
    runtime: Path

    def children(self) -> dict[str, int]:
        """Name -> pid of the supervised processes that live."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = int(re.sub(r"\(.*\)", "x", (folder / "stat").read_text()).split()[3])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and "quiesce" in words:
                names = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]
                found[names[0] if names else "router"] = int(folder.name)
        return found

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.address}/health", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(self, prompt: str) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{self.address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def until(self, condition: Callable[[], Any], seconds: float = START) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return value


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    running: list[Served] = []
    model = make_tiny_llama(tmp_path / "tiny", context=512)
    runtime = Path(tempfile.mkdtemp(prefix="qs", dir="/tmp"))

    def start(*words: str) -> Served:
        log = tmp_path / "log"
        command = [sys.executable, "-m", "quiesce", "serve", str(model), "--port=0", "--max-total-tokens=1024"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIESCE_")}
        environment["XDG_RUNTIME_DIR"] = str(runtime)
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*command, *words], stdout=stream, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path
            )
        served = Served(process, "", log, runtime)
        running.append(served)
        said = served.until(lambda: re.search(r"Quiesce serves tiny at (http://\S+)", log.read_text()))
        served.address = said.group(1)
        return served

    yield start
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()
    for leftover in sorted(runtime.rglob("*"), reverse=True):
        leftover.rmdir() if leftover.is_dir() else leftover.unlink()
    runtime.rmdir()


def test_it_answers_once_it_says_so_and_ctrl_c_leaves_nothing(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.healthy()
    assert served.complete("hello there")["usage"]["completion_tokens"] >= 1
    children = served.children()
    assert sorted(children) == ["decode-0", "prefill-0", "router"]
    (run_dir,) = served.runtime.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0, served.log.read_text()
    assert not any(alive_in_group(pid) for pid in children.values())
    assert list(served.runtime.iterdir()) == []
    assert "is killed" not in served.log.read_text()


@pytest.mark.long  # tests/e2e/test_kills.py kills them one at a time in every run
def test_workers_that_are_killed_come_back_and_the_next_answer_is_the_same(serve: Callable[..., Served]) -> None:
    served = serve()
    before = served.complete("the quick brown fox")["choices"][0]["text"]
    for name in ("prefill-0", "decode-0", "router"):
        old = served.children()
        os.kill(old[name], signal.SIGKILL)
        served.until(lambda n=name, o=old: served.children().get(n, o[n]) != o[n])
        served.until(served.healthy)
        assert served.complete("the quick brown fox")["choices"][0]["text"] == before
        now = served.children()
        assert {n for n in old if old[n] != now[n]} == {name}, "nobody else needs a restart"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0, served.log.read_text()
    assert list(served.runtime.iterdir()) == []


@pytest.mark.long  # as tests/e2e/test_lifecycle.py, with one process for both legs
def test_kill_9_of_serve_ends_every_process_and_the_next_serve_cleans_up(serve: Callable[..., Served]) -> None:
    served = serve("--colocated")
    assert sorted(served.children()) == ["colocated-0", "router"]
    served.complete("once upon a time")
    children = served.children()
    served.process.kill()
    served.process.wait()
    deadline = time.monotonic() + 30
    while any(alive_in_group(pid) for pid in children.values()):
        assert time.monotonic() < deadline, "children of a killed serve live on"
        time.sleep(0.02)
    (abandoned,) = served.runtime.iterdir()
    again = serve("--colocated")
    assert abandoned not in list(served.runtime.iterdir())
    again.process.terminate()
    assert again.process.wait(60) == 0
