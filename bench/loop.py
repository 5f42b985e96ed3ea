"""`make bench-loop`: what a step costs besides the model: scheduling, batching, sampling, streaming out.

    python -m bench.loop [--model NAME] [--steps N] [--rounds N] [--json FILE]

A real colocated worker serves requests that a process in the router's place sends over the real channel. Its model is
replaced by one whose logits are ready, so that a step costs the loop alone. Exit code 1: a goal missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import machine
from bench.cases import Prompts
from bench.goals import Goal
from bench.loop_client import Client, Order
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.kv import KVPool
from quiesce.engine.native.decode_loop import DecodeLoop
from quiesce.engine.native.library import BEST, UNDER, Bounds, Peaks
from quiesce.engine.seats import Seats
from quiesce.models.registry import DEFAULT, resolve
from quiesce.ops.run_dir import ROUTER, RunDir
from quiesce.roles.colocated import ColocatedWorker
from quiesce.roles.settings import WorkerSettings

OWN, THEIR = max(os.sched_getaffinity(0)), min(os.sched_getaffinity(0))  # cores
NAME = "colocated-0"
BATCHES = (32, 256)
PROMPT, CONTEXT, ANSWER = 16, 160, 1500  # tokens
NEW = 48  # tokens of text before it repeats itself: from a model that is certain of what follows it is cheap to draw
SAMPLED = {"temperature": 0.8, "seed": 1}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": SAMPLED,
    "top-p": SAMPLED | {"top_p": 0.95},
    "top-k and top-p": SAMPLED | {"top_k": 50, "top_p": 0.95},
}
MOST_MICROSECONDS = 300.0  # of a step of the largest batch
MOST_SHARE = 0.05  # of a native step of the smallest


@dataclass(frozen=True)
class Cost:
    """Microseconds a step, medians over rounds. `parts`: from a round of their own, each without the others."""

    way: str
    batch: int
    cpu: float  # of all threads of the worker
    wall: float
    parts: dict[str, float]


class Ready:
    """In the model's place: rows are laid out as they are for it, and there are no products."""

    def __init__(self, engine: Engine, logits: torch.Tensor) -> None:
        self._model: Any = engine._model
        rows = max(BATCHES)
        self._hidden = torch.zeros((rows * PROMPT, engine.model_config.hidden_size))
        self._logits = logits.repeat(-(-rows // len(logits)), 1)
        blocks = np.split(self._logits.numpy(), range(UNDER, logits.shape[1], UNDER), axis=1)
        peaks = np.stack([block.max(axis=1) for block in blocks], axis=1)
        bests = np.zeros(len(peaks), BEST)
        bests["value"], bests["token"] = peaks.max(axis=1), self._logits.numpy().argmax(axis=1)
        self._peaks = Peaks(peaks, bests)
        self.library = self._model.library

    def plan(self, rows: list[Row], kv: KVPool, seats: Seats | None = None) -> Any:
        return self._model.plan(rows, kv, seats)

    def forward(self, batch: Any, kv: KVPool) -> torch.Tensor:
        return self._hidden[: len(batch.tokens)]

    def logits_and_peaks(self, x: torch.Tensor) -> tuple[torch.Tensor, Peaks]:
        n = x.shape[0]
        return self._logits[:n], Peaks(self._peaks.blocks[:n], self._peaks.bests[:n])

    def decode_loop(self, kv: KVPool, bounds: Bounds, done: int) -> DecodeLoop:
        return ReadyLoop(self, kv, bounds, done)


class ReadyLoop(DecodeLoop):
    """The engine's own, with the model's part left out: a function of the C library that gives 0 for 0."""

    def __init__(self, ready: Ready, kv: KVPool, bounds: Bounds, done: int) -> None:
        super().__init__(ready.library, 0, kv.tensor, bounds, ready._hidden.shape[1], done)
        self._ready = ready
        nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
        self.desk.quiesce_forward, self.desk.quiesce_logits = nothing, nothing

    def results(self, count: int, vocab: int) -> tuple[torch.Tensor, Peaks]:
        assert count <= len(self._ready._logits)
        return self._ready._logits, self._ready._peaks


class Watch:
    """Time spent in methods of objects; what is watched within another is taken off that one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._within = threading.local()
        self._undo: list[Callable[[], None]] = []

    def on(self, what: str, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        self.spent.setdefault(what, 0.0)

        def timed(*arguments: Any, **named: Any) -> Any:
            stack: list[float] = self._within.__dict__.setdefault("stack", [])
            stack.append(0.0)
            begun = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                took = time.perf_counter() - begun
                self.spent[what] += took - stack.pop()
                if stack:
                    stack[-1] += took

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name))

    def end(self) -> None:
        for undo in self._undo:
            undo()


class Bench:
    """One worker, its client, and rounds of steps."""

    def __init__(self, small: Path, run_dir: RunDir, logits: torch.Tensor) -> None:
        """small: a model of the vocabulary that is wanted; the rest of it does not matter."""
        router, own = run_dir.fresh_keys(ROUTER), run_dir.fresh_keys(NAME)
        settings = WorkerSettings(
            role="colocated",
            name=NAME,
            model=small,
            served_model_name="bench",
            registry=run_dir.registry,
            registry_public_key=router.public,
            keys=run_dir.keys,
            run_dir=run_dir.path,
            max_running=max(BATCHES),
            max_queued=2 * max(BATCHES),
            schedule_conservativeness=0.0,
            max_total_tokens=max(BATCHES) * (PROMPT + ANSWER),
        )
        engine = Engine(small, pool_pages=settings.max_total_tokens // settings.page_size, threads=1)
        engine._model = Ready(engine, logits)  # type: ignore[assignment]
        self.worker = ColocatedWorker(settings, engine)
        self.client = Client(run_dir.keys, self.worker.listener.endpoint, own.public, THEIR, self._turn)

    def _turn(self) -> None:
        self.worker.turn(0.01)

    def close(self) -> None:
        self.client.close()
        self.worker.close()

    def measure(self, way: str, batch: int, steps: int, rounds: int) -> Cost:
        worker = self.worker
        self.client.order(Order(batch, PROMPT, Sampling(ANSWER, ignore_eos=True, **WAYS[way])), self._turn)
        while sum(not s.prefilling for s in worker.batch.members.values()) < batch:
            self._turn()
        self._steps(steps // 4 + 1)
        taken = [self._steps(steps) for _ in range(rounds)]
        watch = self._watch()
        self._steps(steps)
        watch.end()
        self.client.order(Order(0), self._turn)
        while worker.legs.by_rid or worker.thread.busy:
            self._turn()
        return Cost(
            way,
            batch,
            median(cpu for cpu, _ in taken),
            median(wall for _, wall in taken),
            {what: seconds / steps * 1e6 for what, seconds in watch.spent.items()},
        )

    def _steps(self, count: int) -> tuple[float, float]:
        """Microseconds a step: CPU, wall."""
        worker = self.worker
        until = worker.thread.steps + count
        cpu, wall = time.process_time(), time.perf_counter()
        while worker.thread.steps < until:
            worker.turn(0.25)
        return (time.process_time() - cpu) / count * 1e6, (time.perf_counter() - wall) / count * 1e6

    def _watch(self) -> Watch:
        worker, watch = self.worker, Watch()
        watch.on("messages in, timers", worker, "turn")
        watch.on("waiting", worker.poller, "poll")
        watch.on("after the step", worker.steps, "collect")
        watch.on("streaming out", worker.legs, "send")
        watch.on("admission", worker, "schedule")
        watch.on("before the step", worker.steps, "launch")
        return watch


def narrow(folder: Path, to: Path) -> Path:
    """A model with one narrow layer and the vocabulary, the tokenizer and the context of `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config |= shape | {"num_attention_heads": 2, "num_key_value_heads": 1}
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, to / name)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(to)
    return to


def native_step(folder: Path, batch: int) -> tuple[float, torch.Tensor]:
    """Microseconds of CPU time of a step of `batch` single tokens behind CONTEXT tokens of text, and logits behind
    NEW of them."""
    each, greedy = -(-(CONTEXT + 1) // 16), Sampling(1)
    engine = Engine(folder, page_size=16, pool_pages=batch * each, threads=1)
    tables = [list(range(number * each, number * each + each)) for number in range(batch)]
    prompts = [Prompts(folder).one(CONTEXT, number) for number in range(batch)]
    first = [engine.step([Row(prompt, 0, table, greedy)])[0] for prompt, table in zip(prompts, tables, strict=True)]
    rows = [Row([token or 0], CONTEXT, table, greedy) for token, table in zip(first, tables, strict=True)]
    taken = []
    for _ in range(8):
        begun = time.process_time()
        engine.run(rows)
        taken.append(time.process_time() - begun)
    rows = [Row(prompt[:NEW], 0, table, greedy) for prompt, table in zip(prompts, tables, strict=True)]
    return median(taken[1:]) * 1e6, torch.from_numpy(engine.logits(rows)[1].copy())


def goals(costs: list[Cost], native: float) -> list[Goal]:
    small, large = min(BATCHES), max(BATCHES)
    found = []
    for cost in costs:
        if cost.batch == small:
            what = f"{cost.way}: the loop's share of a native step of {small}"
            found.append(Goal(what, cost.cpu / native, MOST_SHARE, MOST_SHARE, at_most=True))
        elif cost.batch == large:
            what = f"{cost.way}: microseconds a step with {large} running"
            found.append(Goal(what, cost.cpu, MOST_MICROSECONDS, MOST_MICROSECONDS, at_most=True))
    return found


def table(costs: list[Cost]) -> str:
    parts = list(costs[0].parts)
    lines = ["| µs a step | " + " | ".join(f"{c.way}, {c.batch}" for c in costs) + " |"]
    lines.append("|---|" + "--:|" * len(costs))
    for what in ["CPU, all threads", "wall", *parts]:
        values = [c.cpu if what == "CPU, all threads" else c.wall if what == "wall" else c.parts[what] for c in costs]
        lines.append(f"| {what} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-loop ARGS=...", description=__doc__)
    parser.add_argument("--model", default=DEFAULT, help="known name, folder or hub id (default %(default)s)")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="only this one")
    parser.add_argument("--steps", type=int, default=60, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    wanted = parser.parse_args()
    os.sched_setaffinity(0, {OWN})
    if (noise := machine.noise("before the bench")) is not None:
        print(f"warning: {noise}")
    folder, run_dir = resolve(wanted.model), RunDir()
    native, logits = native_step(folder, min(BATCHES))
    bench = Bench(narrow(folder, run_dir.path / "model"), run_dir, logits)
    try:
        costs = [
            bench.measure(way, batch, wanted.steps, wanted.rounds) for batch in BATCHES for way in wanted.way or WAYS
        ]
    finally:
        bench.close()
        run_dir.remove()
    print(f"a native step of {min(BATCHES)}, context {CONTEXT}: {native:,.0f} µs\n")
    print(table(costs), end="\n\n")
    found = goals(costs, native)
    if wanted.json:
        wanted.json.write_text(
            json.dumps(
                {"machine": machine.describe(), "native_step_us": native, "costs": [asdict(c) for c in costs]},
                indent=1,
            )
        )
    for goal in found:
        print(goal.text())
    return 0 if all(goal.met for goal in found) else 1


if __name__ == "__main__":
    sys.exit(main())
