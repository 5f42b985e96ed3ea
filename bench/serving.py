"""Served over HTTP: Quiesce colocated and over PD, and vLLM over PD with its NixlConnector, on the same cores.

All are started first, then take their bursts turn by turn. vLLM's processes are stopped while others are measured:
idle, they spin.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import httpx

from bench import load
from bench.cases import OUT, Prompts
from bench.load import Timed
from bench.machine import flags, workers_of
from bench.peers import BFLOAT16_NEEDS, OFFLINE, ONE_THREAD, ROOT, VLLM, VLLM_ENV
from bench.report import Spread
from bench.startup import Serve, log_file

LEVELS = (1, 8, 32)
WAYS = ("Quiesce colocated", "Quiesce PD", "vLLM PD")
READY = 1200.0  # seconds; vLLM compiles, the first time
PREFILL_CORE, DECODE_CORE = 0, 1
LIBRARIES = ("libtcmalloc_minimal.so.4",)  # what vLLM recommends to preload, where it is installed


class Way(AbstractContextManager["Way"], Protocol):
    name: str

    async def ask(self, prompt: list[int], tokens: int) -> Timed: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class QuiesceWay:
    """`quiesce serve`, its workers each on a core; the router and this client run where there is room."""

    def __init__(self, name: str, model: str, flags: list[str]) -> None:
        self.name, self._model = name, model
        self._serve = Serve(model, flags)

    def __enter__(self) -> QuiesceWay:
        self._serve.first_answer()
        for role, pid in workers_of(self._serve.pid).items():
            core = PREFILL_CORE if role == "prefill" else DECODE_CORE
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
        return self

    def __exit__(self, *error: object) -> None:
        self._serve.__exit__()

    def pause(self) -> None:
        """Idle, its processes sleep."""

    def resume(self) -> None:
        pass

    async def ask(self, prompt: list[int], tokens: int) -> Timed:
        begun = time.perf_counter()
        body = load.completion(self._model, prompt, tokens)
        return load.timed(await load.post(self._serve.port, "/v1/completions", body), begun)


class VllmWay:
    """vLLM's api_server twice, as producer and consumer of NixlConnector. This client does the router's part."""

    LEFT: dict[str, object] = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
    )

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        self.name, self._folder, self._log = name, str(folder), log_file()
        self._ports = [_free_port(), _free_port()]
        roles = (("kv_producer", PREFILL_CORE), ("kv_consumer", DECODE_CORE))
        self._processes = [
            self._start(port, role, core, dtype) for port, (role, core) in zip(self._ports, roles, strict=True)
        ]

    def _start(self, port: int, role: str, core: int, dtype: str) -> subprocess.Popen[bytes]:
        transfer = (
            f'{{"kv_connector":"NixlConnector","kv_role":"{role}","kv_buffer_device":"cpu","engine_id":"{role}"}}'
        )
        command = ["taskset", "-c", str(core), str(VLLM), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self._folder, "--served-model-name", "m", "--dtype", dtype, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--max-model-len", "8192", "--max-num-seqs", "64"]
        command += ["--kv-transfer-config", transfer, "--disable-uvicorn-access-log"]
        environment = VLLM_ENV | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as its server is
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
            "LD_PRELOAD": _preloaded(),
        }
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | ONE_THREAD | OFFLINE | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> VllmWay:
        try:
            for port, process in zip(self._ports, self._processes, strict=True):
                self._wait(port, process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.killpg(process.pid, number)

    def _wait(self, port: int, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + READY
        while time.monotonic() < end and process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        self._log.seek(0)
        raise RuntimeError(f"vLLM's server on port {port} is not ready:\n{self._log.read()[-6000:]}")

    async def ask(self, prompt: list[int], tokens: int) -> Timed:
        begun = time.perf_counter()
        wish = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **self.LEFT}}
        prefilled = await load.post(
            self._ports[0], "/v1/completions", load.completion("m", prompt, 1, stream=False) | wish
        )
        handed = {"kv_transfer_params": json.loads(prefilled.text())["kv_transfer_params"]}
        body = load.completion("m", prompt, tokens) | handed
        return load.timed(await load.post(self._ports[1], "/v1/completions", body), begun)


def ways(
    model: str, folder: Path, dtype: str, peers: list[str], wanted: Sequence[str]
) -> dict[str, Callable[[], Way]]:
    """Those of WAYS that are wanted and, where they are a peer's, among `peers`."""
    found: dict[str, Callable[[], Way]] = {
        "Quiesce colocated": lambda: QuiesceWay("Quiesce colocated", model, ["--dtype", dtype, "--colocated"]),
        "Quiesce PD": lambda: QuiesceWay("Quiesce PD", model, ["--dtype", dtype]),
    }
    if {"vllm", "vllm float32"} & set(peers) and VLLM.exists():
        # A burst of 32 in bfloat16 takes it minutes where oneDNN does not multiply that.
        other = "float32" if dtype != "float32" and BFLOAT16_NEEDS not in flags() else ""
        name = f"vLLM PD {other}".rstrip()
        found[name] = lambda: VllmWay(name, folder, other or dtype)
    return {name: make for name, make in found.items() if name.startswith(tuple(wanted))}


def measure(
    makers: dict[str, Callable[[], Way]],
    prompts: Prompts,
    levels: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
    lost: Callable[[str], None],
    found: dict[str, dict[str, dict[str, Spread]]],
) -> None:
    """Into `found`: way -> requests at once -> figures. One burst of each that is not counted comes first.

    `lost` is told of each way that did not come up, or of which a burst failed: it is left out from there on.
    """
    with ExitStack() as stack:
        running = []
        for name, make in makers.items():
            for level in levels:
                found.get(name, {}).pop(str(level), None)  # of an earlier run: no ratio is between two runs
            say(f"starting {name}")
            try:
                way = stack.enter_context(make())
            except RuntimeError as error:
                if name.startswith("Quiesce"):
                    raise
                lost(f"{name}: {error}")
                continue
            way.pause()
            running.append(way)
        for level in levels:
            say(f"{level} at once, {rounds} rounds in turn")
            bursts = in_turn(running, prompts, level, rounds, lost)
            for name, taken in bursts.items():
                found.setdefault(name, {})[str(level)] = load.figures(taken)


def in_turn(
    running: list[Way], prompts: Prompts, level: int, rounds: int, lost: Callable[[str], None]
) -> dict[str, list[tuple[float, list[Timed]]]]:
    """Bursts by way. A way other than Quiesce that fails leaves `running`; what it gave before stays."""
    bursts: dict[str, list[tuple[float, list[Timed]]]] = {way.name: [] for way in running}
    for number in range(rounds + 1):
        for way in running[:] if number % 2 else running[::-1]:
            asked = [prompts.one(OUT, 10000 * level + 100 * number + row) for row in range(level)]
            way.resume()
            try:
                burst = load.burst(way.ask, asked, OUT if number else 8)
            except (RuntimeError, OSError) as error:  # OSError: its time-outs and broken connections
                if way.name.startswith("Quiesce"):
                    raise
                running.remove(way)
                why, before = str(error) or "no answer in time", len(bursts[way.name])
                lost(f"{way.name}, {level} at once, after {before} bursts: {why}")
                continue
            finally:
                way.pause()
            if number:
                bursts[way.name].append(burst)
    return {name: taken for name, taken in bursts.items() if taken}


def _preloaded() -> str:
    found = [str(path) for name in LIBRARIES for path in Path("/usr/lib").glob(f"*/{name}")]
    iomp = Path(VLLM).parents[1] / "lib" / "libiomp5.so"
    return ":".join([*found, *([str(iomp)] if iomp.exists() else [])])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
