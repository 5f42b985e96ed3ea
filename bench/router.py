"""`make bench-router`: what the router adds to an answer, and how many tokens it streams on one core.

    python -m bench.router [--model NAME] [--seconds N]

A real router process on a core of its own. Worker and clients are this process, over the real channel and real HTTP:
the worker answers at once, or draws a token for each stream at a fixed pace. Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
import zmq

from bench import machine
from bench.cases import Prompts
from bench.goals import Goal
from quiesce.channel import AsyncLink, AsyncListener, KeyRing, start_authenticator
from quiesce.core.fingerprint import Fingerprint, Limits
from quiesce.core.messages import Address, Drawn, Ended, Register, Start, Tokens
from quiesce.models.registry import DEFAULT, resolve
from quiesce.ops.run_dir import ROUTER, RunDir
from quiesce.roles.settings import RouterSettings
from quiesce.router import app

OWN, THEIR = max(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))  # cores: the router's, everybody else's
NAME, MODEL = "colocated-0", "bench"
STREAMS, PACE = 64, 0.0115  # answers at once; seconds between two of their tokens: 5,565 tokens a second
REQUESTS, PROMPT = 200, 128  # one after the other; tokens of text
TOKEN = 260  # any id whose text is ASCII
MOST_MS, LEAST_TOKENS = 1.0, 5000.0


class Worker:
    """A colocated worker without an engine. It answers with one token at once, or paced where more are asked for."""

    def __init__(self, run_dir: RunDir, router_key: str) -> None:
        self._keys = run_dir.fresh_keys(NAME)
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = start_authenticator(self._context, KeyRing(run_dir.keys / "ring"))
        self._control = AsyncListener(self._context, f"ipc://{run_dir.path}/{NAME}.sock", self._keys)
        self._registration = AsyncLink(self._context, run_dir.registry, router_key, self._keys)
        self._epoch = secrets.randbits(64) | 1
        self._steps = 0
        self._router = b""
        self._running: dict[str, int] = {}  # rid -> tokens that are still to come
        self.heard = self.said = 0.0  # the latest Start, the latest token
        self.sent = 0
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work()) for work in (self._beat, self._hear, self._pace)]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._control.close()
        self._registration.close()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _beat(self) -> None:
        fingerprint = Fingerprint(MODEL, "w", "bfloat16", "page-major/row", 16, 4096, 1, 1, 32)
        address = Address(NAME, self._epoch, self._control.endpoint, self._keys.public)
        while True:
            self._steps += 1
            limits = Limits(8192, 1 << 24, 4096)
            self._registration.send(Register("colocated", address, fingerprint, limits, self._steps, 0, 0))
            await asyncio.sleep(0.2)

    async def _hear(self) -> None:
        while True:
            for received in await self._control.receive():
                if isinstance(received.message, Start):
                    self.heard, self._router = time.perf_counter(), received.sender
                    start = received.message
                    if start.sampling.max_tokens > 1:
                        self._running[start.rid] = start.sampling.max_tokens
                    else:
                        self.said = time.perf_counter()
                        self._control.send(received.sender, Tokens(start.rid, (TOKEN,)))
                        self._end(start.rid, 1)

    async def _pace(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + PACE, time.perf_counter() - PACE)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(self._running) == STREAMS:
                rids = tuple(self._running)
                self._control.send(self._router, Drawn(rids, (TOKEN,) * len(rids)))
                self.sent += len(rids)

    def _end(self, rid: str, tokens: int) -> None:
        self._control.send(self._router, Ended(rid, "length", 200, "", PROMPT, tokens))


class Stream:
    """Streamed completions over a bare socket, one after the other: counts frames and tokens, parses nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.frames = 0
        self.asked = 0.0  # when the whole request was written

    async def run(self, body: dict[str, Any], first: Callable[[], None] = lambda: None) -> None:
        """On the connection of the request before, if that is still there."""
        self._ends = self._ends or await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._ends
        raw = json.dumps(body | {"model": MODEL, "stream": True, "ignore_eos": True, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.asked, before = time.perf_counter(), self.frames
        writer.write(head.encode() + raw)
        try:
            while data := await reader.read(1 << 16):
                if (found := data.count(b'"text":"')) and self.frames == before:
                    first()
                self.frames += found
                if data.endswith(b"0\r\n\r\n"):
                    return
            raise RuntimeError("the router closed a stream before its end")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None


def cpu_of(pid: int) -> float:
    """Seconds, of all its threads that live."""
    return sum(cpu_by_thread(pid).values())


def cpu_by_thread(pid: int) -> dict[str, float]:
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        except OSError:  # it has just ended
            continue
    return found


async def latency(
    worker: Worker, port: int, pid: int, prompts: Prompts, tokenizer: Any, *, anew: bool = False
) -> dict[str, float]:
    """Median milliseconds that a request spends in the router: on its way in, and its first token's way out. `anew`:
    each comes on a connection of its own, which the router has to accept first."""
    ways: dict[str, list[float]] = {"in": [], "out": [], "both": []}
    stream, began = Stream(port), cpu_of(pid)
    for number in range(REQUESTS):
        text, told = tokenizer.decode(prompts.one(PROMPT, number)), [0.0]
        if anew:
            stream.close()
        await stream.run(
            {"prompt": text, "max_tokens": 1}, lambda told=told: told.__setitem__(0, time.perf_counter())
        )
        came_in, went_out = worker.heard - stream.asked, told[0] - worker.said
        for way, seconds in (("in", came_in), ("out", went_out), ("both", came_in + went_out)):
            ways[way].append(seconds * 1e3)
    stream.close()
    return {way: median(found) for way, found in ways.items()} | {"CPU": (cpu_of(pid) - began) / REQUESTS * 1e3}


async def throughput(worker: Worker, port: int, pid: int, seconds: float) -> dict[str, float]:
    """STREAMS answers at once: tokens a second of wall and of the router's CPU time, and frames a token."""
    streams = [Stream(port) for _ in range(STREAMS)]
    body = {"prompt": [TOKEN] * 16, "max_tokens": 8000}
    running = [asyncio.create_task(stream.run(body)) for stream in streams]
    while sum(stream.frames for stream in streams) < STREAMS:
        await asyncio.sleep(0.05)
    await asyncio.sleep(1)

    def now() -> tuple[float, float, int, int]:
        return time.perf_counter(), cpu_of(pid), worker.sent, sum(stream.frames for stream in streams)

    before = now()
    await asyncio.sleep(seconds)
    wall, cpu, sent, frames = (b - a for a, b in zip(before, now(), strict=True))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {
        "tokens a second": sent / wall,
        "tokens a CPU second": sent / cpu,
        "share of the core": cpu / wall,
        "frames a token": frames / sent,
    }


def serve(settings: RouterSettings) -> None:
    """The router's process."""
    os.sched_setaffinity(0, {OWN})
    sys.exit(app.run(settings))


async def measure(run_dir: RunDir, folder: Path, seconds: float) -> list[dict[str, float]]:
    from tokenizers import Tokenizer  # noqa: PLC0415

    key = run_dir.fresh_keys(ROUTER).public
    port = free_port()
    settings = RouterSettings(
        model=folder,
        served_model_name=MODEL,
        keys=run_dir.keys,
        registry=run_dir.registry,
        port=port,
        log_level="error",
    )
    router = multiprocessing.get_context("spawn").Process(target=serve, args=(settings,))
    router.start()
    worker = Worker(run_dir, key)
    try:
        assert router.pid is not None
        await until_ready(port)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        await latency(worker, port, router.pid, Prompts(folder), tokenizer)  # warm
        ways = await latency(worker, port, router.pid, Prompts(folder), tokenizer)
        anew = await latency(worker, port, router.pid, Prompts(folder), tokenizer, anew=True)
        return [ways, anew, await throughput(worker, port, router.pid, seconds)]
    finally:
        worker.close()
        router.kill()
        router.join()


def free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_ready(port: int, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            stream = Stream(port)
            await stream.run({"prompt": [TOKEN], "max_tokens": 1})
            stream.close()
            return
        except (OSError, RuntimeError):
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the router gave no answer within {patience:.0f} s; its messages are above")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-router ARGS=...", description=__doc__)
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of streaming")
    wanted = parser.parse_args()
    os.sched_setaffinity(0, {THEIR})
    if (noise := machine.noise("before the bench")) is not None:
        print(f"warning: {noise}")
    run_dir = RunDir()
    try:
        ways, anew, rates = uvloop.run(measure(run_dir, resolve(wanted.model), wanted.seconds))
    finally:
        run_dir.remove()
    print(f"a request in, {PROMPT} tokens of text: {ways['in']:.2f} ms; a token out: {ways['out']:.2f} ms")
    print(f"on a connection of its own each: {anew['in']:.2f} ms and {anew['out']:.2f} ms")
    print(f"CPU of the router for a whole request of one token: {ways['CPU']:.2f} ms")
    for what, value in rates.items():
        print(f"{what}: {value:,.2f}")
    found = [
        Goal("ms that the router adds to the first token, median", ways["both"], MOST_MS, MOST_MS, at_most=True),
        Goal(
            "tokens that it streams in a second of its core", rates["tokens a CPU second"], LEAST_TOKENS, LEAST_TOKENS
        ),
    ]
    for goal in found:
        print(goal.text())
    return 0 if all(goal.met for goal in found) else 1


if __name__ == "__main__":
    sys.exit(main())
