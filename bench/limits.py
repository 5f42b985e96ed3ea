"""The two physical limits of one core: bytes over read bandwidth, operations over arithmetic rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cases import Case
from quiesce.engine.config import ModelConfig, dtype_of
from quiesce.engine.product import packable, packed, product

READ_BYTES = 1 << 30  # far beyond any cache
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """`bandwidth` in bytes a second; `rate` in floating-point operations a second (2 to a multiply-add)."""

    bandwidth: float
    rate: float


def measure(dtype: str, width: int, inner: int) -> Limits:
    """The best of a few tries (CPU time): reading 1 GiB, and [1024, width] times [inner, width] either layout."""
    torch.set_num_threads(1)
    memory = torch.ones(READ_BYTES // 4)
    reading = min(_best(memory.sum), _best(lambda: torch.dot(memory, memory)))
    x, matrix = torch.randn(1024, width).to(dtype_of(dtype)), torch.randn(inner, width).to(dtype_of(dtype))
    layouts = [matrix, packed(matrix)] if packable(matrix) else [matrix]
    multiplying = min(_best(lambda m=one: product(x, m)) for one in layouts)
    return Limits(READ_BYTES / reading, 2 * 1024 * width * inner / multiplying)


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def ceiling(case: Case, config: ModelConfig, dtype: str, limits: Limits) -> float:
    """Tokens a second that no engine on this core can pass: the slower of the two limits, each met in full."""
    size = dtype_of(dtype).itemsize
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = config.layers * config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    attention = 4 * config.layers * q * case.context  # operations of one token
    if not case.steps:
        read, work = (block + head) * size, case.tokens * (2 * block + attention) + 2 * head
        return case.tokens / max(read / limits.bandwidth, work / limits.rate)
    cached = case.batch * case.context * config.layers * 2 * kv
    read, work = (block + head + cached) * size, case.batch * (2 * (block + head) + attention)
    return case.batch / max(read / limits.bandwidth, work / limits.rate)
