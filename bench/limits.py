"""The two physical limits of one core: bytes over read bandwidth, operations over arithmetic rate.

python -m bench.limits DTYPE WIDTH INNER      one line of JSON
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.cases import Case
from bench.peers import ONE_THREAD, ROOT
from quiesce.engine.config import ModelConfig, dtype_of
from quiesce.engine.product import packable, packed, product

READ_BYTES = 1 << 30  # far beyond any cache
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """`bandwidth` in bytes a second; `rate` in floating-point operations a second (2 to a multiply-add)."""

    bandwidth: float
    rate: float


def measured(core: int, dtype: str, config: ModelConfig) -> Limits:
    """In a process of its own on `core`."""
    sizes = [str(config.hidden_size), str(config.intermediate_size)]
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.limits", dtype, *sizes]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, check=True, capture_output=True, text=True)
    return Limits(**json.loads(found.stdout))


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


def ceiling(case: Case, config: ModelConfig, dtype: str, limits: Limits, weight_bytes: float | None = None) -> float:
    """Tokens a second that no engine on this core can pass: the slower of the two limits, each met in full.

    `weight_bytes` of one weight, where it is not the dtype's.
    """
    size = dtype_of(dtype).itemsize
    weight = size if weight_bytes is None else weight_bytes
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = config.layers * config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size

    def ops(tokens: int) -> float:
        """Operations of one prompt."""
        return tokens * (2 * block + 4 * config.layers * q * (tokens // 2)) + 2 * head

    if case.kind == "prefill":
        return case.prompt / max((block + head) * weight / limits.bandwidth, ops(case.prompt) / limits.rate)
    cached = case.batch * case.context * config.layers * 2 * kv * size
    read = (block + head) * weight + cached
    work = case.batch * (2 * (block + head) + 4 * config.layers * q * case.context)
    step = max(read / limits.bandwidth, work / limits.rate)
    if case.kind == "decode":
        return case.batch / step
    return case.batch * case.steps / (case.batch * ops(case.prompt) / limits.rate + (case.steps - 1) * step)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
