"""How fast it is on this device: memory and arithmetic limits, decode, prefill, graphs, backends, mirror copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.gpu_models import PAGE, Bare, bare, random_weights, recorder
from quiesce.engine.config import ModelConfig
from quiesce.engine.gpu import choice
from quiesce.engine.gpu.mirror import Mirror
from quiesce.transfer.arena import shared_arena

ROUNDS = 7


@dataclass(frozen=True)
class Limits:
    """Bytes a second and operations a second, as measured here."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Figure:
    what: str
    milliseconds: float
    tokens: float = 0.0  # a second
    share: float = 0.0  # of the limit

    def text(self) -> str:
        speed = f"{self.tokens:12,.0f} tok/s {100 * self.share:5.0f} % of the limit" if self.tokens else ""
        return f"  {self.what:<58}{self.milliseconds:10.3f} ms{speed}"


def seconds(work: Callable[[], object], device: torch.device, repeats: int, rounds: int = ROUNDS) -> float:
    """The median over rounds of one call's wall time, the device waited for after every `repeats` calls. One round is
    for dry runs: its call is the first."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    if rounds > 1:
        work()
    wait()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        taken.append((time.perf_counter() - begun) / repeats)
    return median(taken)


def limits(device: torch.device, dtype: torch.dtype, *, size: int, width: int) -> Limits:
    """Copying `size` bytes, read and written; a square matrix product."""
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(memory)
    copying = seconds(lambda: other.copy_(memory), device, 4)
    matrix = torch.randn((width, width), device=device, dtype=dtype)
    multiplying = seconds(lambda: matrix @ matrix, device, 4)
    return Limits(2 * size / copying, 2 * width**3 / multiplying)


def decode_limit(model: Bare, batch: int, context: int, found: Limits) -> float:
    """Seconds that a step of single tokens takes at least."""
    config = model.config
    size = model.kv.tensor.element_size()
    cached = batch * context * config.layers * 2 * config.kv_heads * config.head_dim * size
    read = model.weight_bytes() + cached
    work = (
        2 * batch * model.weight_bytes() / size + 4 * batch * context * config.layers * config.heads * config.head_dim
    )
    return max(read / found.bandwidth, work / found.rate)


def prefill_limit(model: Bare, tokens: int, found: Limits) -> float:
    config = model.config
    size = model.kv.tensor.element_size()
    head = config.vocab_size * config.hidden_size
    products = 2 * tokens * (model.weight_bytes() / size - head) + 2 * head
    scores = 4 * config.layers * config.heads * config.head_dim * tokens * tokens / 2
    return max(model.weight_bytes() / found.bandwidth, (products + scores) / found.rate)


def steps(
    config: ModelConfig,
    device: torch.device,
    backend: str,
    *,
    batches: Sequence[int],
    context: int,
    prompts: Sequence[int],
    found: Limits,
    repeats: int,
    rounds: int,
    late: Callable[[], bool],
) -> Iterator[Figure]:
    """Decode at each batch size, kernel by kernel and as a graph; prompts of each length in one piece."""
    attention = choice.MAKE[backend](config, PAGE, device, torch.bfloat16)
    weights = random_weights(config, device, torch.bfloat16)
    longest = max(context + 1, *prompts)
    pages = max(max(batches) * -(-(context + 1) // PAGE), -(-longest // PAGE))
    model = bare(config, weights, attention, pages, longest)
    ways = [("kernel by kernel", False)] + ([("graph", True)] if attention.graphs else [])
    for way, graph in ways:
        if graph:
            model.model.record(model.kv, attention, recorder(device), tuple(batches))
        for batch in batches:
            if late():
                return
            rows = model.rows(batch, 1, context)
            taken = seconds(lambda rows=rows: model.step(rows), device, repeats, rounds)  # type: ignore[misc]
            share = decode_limit(model, batch, context, found) / taken
            yield Figure(f"{backend}, decode of {batch} at {context}, {way}", taken * 1e3, batch / taken, share)
    for tokens in prompts:
        if late():
            return
        rows = model.rows(1, tokens, 0)
        taken = seconds(lambda rows=rows: model.step(rows), device, 1, rounds)  # type: ignore[misc]
        share = prefill_limit(model, tokens, found) / taken
        yield Figure(f"{backend}, prompt of {tokens}", taken * 1e3, tokens / taken, share)


def copies(config: ModelConfig, device: torch.device, dtype: str, pages: int) -> Iterator[Figure]:
    """What the mirror costs: whole pages to host memory and back."""
    page_bytes = config.page_bytes(dtype, PAGE)
    arena = shared_arena(pages, page_bytes)
    mirror = Mirror(torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device), arena)
    every = list(range(pages))
    kind = "pinned" if mirror.pinned else "not pinned"
    for name, move in (("published", mirror.publish), ("fetched", mirror.fetch)):
        taken = seconds(lambda move=move: move(every), device, 1)  # type: ignore[misc]
        rate = pages * page_bytes / taken / 1e9
        yield Figure(f"{pages} pages of {page_bytes >> 10} KiB {name} ({kind}), {rate:.1f} GB/s", taken * 1e3)
