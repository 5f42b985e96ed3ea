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
from functools import partial

import torch

from bench.cases import Case
from bench.peers import ONE_THREAD, ROOT
from quiesce.engine.config import ModelConfig, dtype_of
from quiesce.engine.native.library import levels, load
from quiesce.engine.native.model import KINDS
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
    """The best of a few tries (CPU time): reading 1 GiB; [rows, width] times [inner, width] by whatever is fastest
    here, PyTorch in this dtype or in float32, either layout, or the native library, of many rows or a batch of 32."""
    torch.set_num_threads(1)
    memory = torch.ones(READ_BYTES // 4)
    reading = min(_best(memory.sum), _best(lambda: torch.dot(memory, memory)))
    matrix, rates = torch.randn(inner, width), list[float]()
    for rows in (32, 1024):
        x, tries = torch.randn(rows, width), list[Callable[[], object]]()
        for kind in {dtype_of(dtype), torch.float32}:
            plain = matrix.to(kind)
            layouts = [plain, packed(plain)] if packable(plain) else [plain]
            tries += [partial(product, x.to(kind), one) for one in layouts]
        if levels():
            tries.append(_native(x, matrix.to(dtype_of(dtype))))
        rates += [2 * rows * width * inner / _best(one) for one in tries]
    return Limits(READ_BYTES / reading, max(rates))


def _native(x: torch.Tensor, matrix: torch.Tensor) -> Callable[[], object]:
    library, kind = load(levels()[0]), KINDS[matrix.dtype]
    panels = torch.empty(library.packed_bytes(kind, *matrix.shape), dtype=torch.uint8)
    library.pack(kind, matrix.data_ptr(), None, None, *matrix.shape, panels.data_ptr())
    out = torch.empty(len(x), len(matrix))

    def multiply() -> torch.Tensor:
        library.product(kind, x.data_ptr(), len(x), panels.data_ptr(), *matrix.shape, out.data_ptr())
        return out

    return multiply


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
