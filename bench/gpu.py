"""The bench of a machine with a GPU, in under 8 minutes: first whether it is right, then how fast it is.

Exits 1 when something is wrong, and then measures nothing; exits 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from bench import gpu_checks, gpu_speed, machine
from bench.gpu_models import LLAMA_8B, SMALL, shaped
from quiesce.engine.config import ModelConfig, read_config
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu import choice
from quiesce.engine.gpu.flashinfer_attention import Unfit
from quiesce.engine.gpu.graphs import on
from quiesce.models.registry import DEFAULT, resolve

RESULTS = Path(__file__).parent / "results"
BATCHES, CONTEXT, PROMPTS = (1, 8, 32, 64), 1024, (512, 2048, 8192)
SPARE = 4 << 30  # bytes of device memory that the large shape must leave


def options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-gpu ARGS=...", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1; cpu only with --dry-run")
    parser.add_argument("--model", default=DEFAULT, help="for correctness: name or folder (default %(default)s)")
    parser.add_argument("--backend", action="append", choices=choice.BACKENDS, help="only this; default: all")
    parser.add_argument("--seconds", type=float, default=420, help="what would begin later is left out")
    parser.add_argument("--dry-run", action="store_true", help="everything once, tiny: a test of the bench itself")
    parser.add_argument("--json", type=Path, help="where to (default: a new file in bench/results)")
    return parser.parse_args(words)


class Bench:
    def __init__(self, asked: argparse.Namespace, device: torch.device) -> None:
        self.asked, self.device = asked, device
        self.until = time.monotonic() + asked.seconds
        self.backends: list[str] = asked.backend or list(choice.BACKENDS)
        self.checks: list[gpu_checks.Check] = []
        self.figures: list[gpu_speed.Figure] = []
        self.left_out: list[str] = []

    def late(self) -> bool:
        return time.monotonic() > self.until

    def check(self, found: Iterable[gpu_checks.Check]) -> None:
        for one in found:
            self.checks.append(one)
            print(one.text(), flush=True)

    def correctness(self, folder: Path) -> bool:
        print("Correctness, against float64 on the CPU:")
        dry = self.asked.dry_run
        shapes = ("small",) if dry else tuple(gpu_checks.HEADS)
        for backend in self.backends:
            self.check(gpu_checks.attention(backend, self.device, shapes))
        try:
            self.engine(folder)
        except EngineError as error:
            self.check([gpu_checks.Check("an engine", False, str(error))])
        return all(one.right is not False for one in self.checks)

    def engine(self, folder: Path) -> None:
        """Raises EngineError when it refuses to run here."""
        exact, dry = gpu_checks.Exact(folder), self.asked.dry_run
        lengths, answer = ((5, 18), 2) if dry else ((7, 64, 129, 300), 48)
        named = self.named()
        for dtype in ("float32", "bfloat16"):
            self.check(gpu_checks.whole_model(folder, exact, str(self.device), dtype, lengths, answer, named))
        self.check([gpu_checks.mirrored(folder, str(self.device), "torch" if dry else named)])

    def named(self) -> str:
        """Of the engine: what it takes by itself, unless one backend was asked for or there is no device."""
        return self.backends[0] if len(self.backends) == 1 else "triton" if self.device.type == "cpu" else "auto"

    def speed(self, name: str, config: ModelConfig) -> None:
        dry = self.asked.dry_run
        size, width = (1 << 20, 64) if dry else (1 << 30, 8192)
        found = gpu_speed.limits(self.device, torch.bfloat16, size=size, width=width)
        reads, does = found.bandwidth / 1e9, found.rate / 1e12
        print(f"{name}, bfloat16; limits here: {reads:,.0f} GB/s copied, {does:,.1f} Tflop/s multiplied")
        for backend in self.backends:
            try:
                for figure in gpu_speed.steps(
                    config,
                    self.device,
                    backend,
                    batches=(1, 2) if dry else BATCHES,
                    context=20 if dry else CONTEXT,
                    prompts=(17,) if dry else PROMPTS,
                    found=found,
                    repeats=1 if dry else 10,
                    rounds=1 if dry else gpu_speed.ROUNDS,
                    late=self.late,
                ):
                    self.tell(figure, name)
            except Unfit as unfit:
                self.leave_out(f"{name}, {backend}: it {unfit}")
            except torch.OutOfMemoryError as error:
                self.leave_out(f"{name}, {backend}: {str(error).partition('. ')[0]}")
        for figure in gpu_speed.copies(config, self.device, "bfloat16", 8 if dry else 512):
            self.tell(figure, name)
        if self.late():
            self.leave_out(f"{name}: what is missing above, for time")

    def tell(self, figure: gpu_speed.Figure, name: str) -> None:
        self.figures.append(gpu_speed.Figure(f"{name}: {figure.what}", *list(asdict(figure).values())[1:]))
        print(figure.text(), flush=True)

    def leave_out(self, what: str) -> None:
        self.left_out.append(what)
        print(f"  left out: {what}", flush=True)

    def write(self, where: Path | None) -> None:
        name = f"gpu-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        where = where or RESULTS / name
        where.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": {**machine.describe(), "device": described(self.device)}, "left_out": self.left_out}
        found |= {"checks": [asdict(one) for one in self.checks], "figures": [asdict(one) for one in self.figures]}
        where.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"written to {where}")


def described(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type}: not a GPU, so that no figure here means anything"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def main(words: list[str] | None = None) -> int:
    asked = options(words)
    if (asked.device == "cpu" and not asked.dry_run) or (asked.device != "cpu" and not torch.cuda.is_available()):
        print(
            "bench-gpu needs a CUDA device that PyTorch can use; without one: --dry-run --device cpu", file=sys.stderr
        )
        return 2
    device = torch.device(asked.device)
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads it
    bench = Bench(asked, device)
    print(described(device))
    folder = resolve(asked.model)
    with torch.inference_mode(), on(device):
        right = bench.correctness(folder)
        if right:
            bench.speed("a small shape" if asked.dry_run else folder.name, small(asked, folder))
            if not asked.dry_run and room_for(shaped(LLAMA_8B, PROMPTS[-1]), device):
                bench.speed("the shape of an 8B Llama", shaped(LLAMA_8B, PROMPTS[-1]))
    bench.write(asked.json)
    print("right" if right else "WRONG, see above: nothing was measured")
    return 0 if right else 1


def small(asked: argparse.Namespace, folder: Path) -> ModelConfig:
    """The model's own shape, with room for the longest prompt."""
    return shaped(SMALL, 64) if asked.dry_run else read_config(folder)


def room_for(config: ModelConfig, device: torch.device) -> bool:
    """Weights, pool and the last layer's logits, with some to spare."""
    block = config.hidden_size * (2 * config.heads * config.head_dim + 3 * config.intermediate_size)
    weights = 2 * (config.layers * block + 2 * config.vocab_size * config.hidden_size)
    pool = max(BATCHES) * (CONTEXT + 16) * config.page_bytes("bfloat16", 1)
    return weights + pool + SPARE < torch.cuda.mem_get_info(device)[0]


if __name__ == "__main__":
    sys.exit(main())
