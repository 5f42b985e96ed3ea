"""`quiesce serve` as a user runs it: a process, a port, and what its own pages say about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from ports import free_port
from quiesce.lab.idle import not_idle

START_SECONDS = 170.0
STOP_SECONDS = 60.0
ASKED = 6  # times, until every worker has answered; each takes up to five seconds
IDLE_SECONDS = 30.0  # against a hang; --hold-timeout of these tests is 5 s
READY = re.compile(rb"at (http://\S+) .*ready after")


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    """Process ids below `pid`, zombies left out."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Product:
    """Use as a context manager. `folder` keeps the log and takes the place of the runtime directory."""

    def __init__(self, model: str | Path, folder: Path, *options: str, name: str | None = None) -> None:
        self.model = str(model)
        self.name = name or Path(self.model).name
        self.folder = folder
        self.runtime = folder / "r"  # socket paths are short
        self.runtime.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log = folder / f"serve-{self.port}.log"
        self.url = f"http://127.0.0.1:{self.port}"
        words = [sys.executable, "-m", "quiesce", "serve", self.model, f"--port={self.port}", *options]
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.boot: dict[str, dict[str, Any]] = {}
        self.http = httpx.Client(base_url=self.url, timeout=120.0)

    # ------------------------------------------------------------ its life

    def wait(self) -> Product:
        """Until it says that it is ready."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            return READY.search(self.log.read_bytes()) is not None

        until(ready, START_SECONDS, f"serve to be ready; {self.log}")
        self.processes = descendants(self.process.pid)
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def leftovers(self) -> list[str]:
        """What a stopped one left behind, a line each."""
        seen = getattr(self, "processes", set())
        lines = [f"process {pid}: {_command(pid)}" for pid in sorted(seen) if alive(pid)]
        lines += [f"folder {path}" for path in self.runtime.iterdir()]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and str(self.runtime) in _command(int(entry.name)):
                lines.append(f"process {entry.name}: {_command(int(entry.name))}")
        return lines

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            below = descendants(self.process.pid)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for pid in below:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Product:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ asking

    def client(self, timeout: float = 120.0) -> openai.OpenAI:
        """Never tries again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout)

    def ask(self, prompt: Sequence[int] | str, tokens: int = 8, **more: Any) -> str:
        """The text of a greedy completion of exactly `tokens` tokens."""
        body = {
            "model": self.name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    # ------------------------------------------------------------ looking

    def ledger(self) -> dict[str, dict[str, Any]]:
        """State by worker; a worker that does not answer has `error` alone. One that is slow for seconds is asked
        again."""
        for _ in range(ASKED):
            state: dict[str, dict[str, Any]] = self.http.get("/debug/ledger").json()
            if not any("did not answer" in each.get("error", "") for each in state.values()):
                break
        return state

    def epochs(self) -> dict[str, str]:
        return {name: state["epoch"] for name, state in self.ledger().items() if "epoch" in state}

    def pid(self, name: str) -> int:
        """Of a worker, or of the `router`."""
        if name != "router":
            return int(self.ledger()[name]["pid"])
        for pid in descendants(self.process.pid):
            words = _command(pid).split()
            if "quiesce" in words and "router" in words:
                return pid
        raise AssertionError("no router process")

    def mover(self, name: str = "prefill-0") -> int:
        (pid,) = descendants(self.pid(name))
        return pid

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self) -> dict[str, float]:
        """Value by `name{labels}`, as the page writes them. A worker that has not answered within a scrape is asked
        again: without it its numbers would be taken for zero."""
        for _ in range(ASKED):
            lines = self.http.get("/metrics").text.splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
            found = {name: float(value) for name, value in pairs}
            if all(value for name, value in found.items() if name.startswith("quiesce:worker_answers")):
                break
        return found

    def busy(self, boot: dict[str, dict[str, Any]] | None = None) -> list[str]:
        """Why it is not idle, a line each."""
        lines = []
        for name, state in self.ledger().items():
            if "error" in state:
                lines.append(f"{name}: {state['error']}")
                continue
            same = (boot or {}).get(name)
            if same is not None and same["epoch"] != state["epoch"]:
                same = None
            lines += [f"{name}: {line}" for line in not_idle(state, same)]
        metrics = self.metrics()
        lines += [f"{name} is {value:g}" for name, value in metrics.items() if "legs{" in name and value]
        return lines

    def check_idle(self, boot: dict[str, dict[str, Any]] | None = None, seconds: float = IDLE_SECONDS) -> None:
        try:
            until(lambda: not self.busy(boot), seconds, "the idle check")
        except TimeoutError:
            raise AssertionError("not idle:\n  " + "\n  ".join(self.busy(boot))) from None

    def resident(self) -> dict[str, int]:
        """MiB of private memory by process name."""
        found = {"router": _private(self.pid("router"))}
        return found | {name: _private(int(state["pid"])) for name, state in self.ledger().items()}

    def router_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid('router')}/fd"))


def _private(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = sum(int(value) for value in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))
    return kib // 1024


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
