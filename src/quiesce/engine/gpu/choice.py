"""Which attention runs on a device: the best backend that is there and that agrees with float64 on scratch memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quiesce.engine.batch import Row
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu.flashinfer_attention import FlashInferAttention, Unfit
from quiesce.engine.gpu.paged import Attention, TorchAttention
from quiesce.engine.gpu.segments import Segment, segments
from quiesce.engine.weights import Weights

log = logging.getLogger("quiesce.engine")

AUTO = "auto"
BACKENDS = ("flashinfer", "triton", "torch")  # best first
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of results of about 1


def device_of(name: str) -> torch.device:
    """Raises EngineError for one that is not here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"--device {name} cannot be used: {_first_line(error)}") from None
    return device


@dataclass(frozen=True)
class Choice:
    """`decode` is what graphs hold: the best backend that can be held by one, None where none can. `how`: for
    people."""

    attention: Attention
    decode: Attention | None
    how: str


def choose(wanted: str, config: ModelConfig, page_size: int, weights: Weights) -> Choice:
    """For where the weights are. Raises EngineError for a backend that is asked for by name and cannot be used."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    if wanted not in (AUTO, *BACKENDS):
        raise EngineError(f"attention backend {wanted!r} is none of {', '.join((AUTO, *BACKENDS))}")
    usable, passed_over = dict[str, Attention](), list[str]()
    for name in BACKENDS if wanted == AUTO else (wanted,):
        try:
            backend = MAKE[name](config, page_size, device, dtype)
            error = trial(backend, config, page_size, device, dtype)
            if not error <= TOLERANCE[dtype]:
                raise Unfit(f"is off by {error:.1e} on scratch memory")
            usable[name] = backend
        except Unfit as unfit:
            passed_over.append(f"{name} {unfit}")
        except Exception as error:
            passed_over.append(f"{name} fails on scratch memory: {_first_line(error)}")
    if not usable:
        raise EngineError(f"no attention backend works on {device}: {'; '.join(passed_over)}")
    best = next(iter(usable.values()))
    if wanted == AUTO and isinstance(best, TorchAttention):
        log.warning("attention by plain PyTorch, several times slower: %s", "; ".join(passed_over))
    decode = next((backend for backend in usable.values() if backend.graphs), None)
    return Choice(best, decode, "; ".join([f"attention by {best.name}", *passed_over]))


def trial(
    attention: Attention, config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype
) -> float:
    """The largest error against float64 for single tokens and chunks, over a page-major pool of random pages."""
    draw = torch.Generator().manual_seed(0)
    group = config.heads // config.kv_heads
    count = -(-130 // page_size)
    pages = torch.randperm(4 * count, generator=draw).tolist()
    shape = (4 * count, 2, 2, page_size, config.kv_heads, config.head_dim)
    pool = torch.randn(shape, generator=draw).to(device, dtype)
    k, v = pool[:, 1, 0], pool[:, 1, 1]
    rows = [
        Row([0] * tokens, start, pages[number * count : (number + 1) * count])
        for number, (tokens, start) in enumerate(((1, 0), (1, 129), (5, 60), (67, 0)))
    ]
    worst = 0.0
    for segment in segments(rows, page_size, 2, device):
        tokens = segment.last - segment.first
        fused = torch.randn((tokens, (group + 2) * config.kv_heads * config.head_dim), generator=draw)
        q = fused.to(device, dtype)[:, : group * config.kv_heads * config.head_dim]
        q = q.view(tokens, config.kv_heads, group, config.head_dim)
        attention.plan(segment)
        got = attention.attend(q, k, v, segment)
        worst = max(worst, float((got.cpu().double() - exact(q, k, v, segment)).abs().max()))
    return worst


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
    """As `Attention.attend`, in float64 on the CPU, one row after the other."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=torch.float64)
    tables, ends, offsets = segment.host
    for table, end, first, last in zip(tables, ends.tolist(), offsets[:-1], offsets[1:], strict=True):
        used = torch.from_numpy(table).long()[: -(-end // k.shape[1])]
        keys, values = (x[used].flatten(0, 1)[:end] for x in (k, v))
        scores = torch.einsum("thgd,nhd->thgn", q[first:last], keys) * q.shape[-1] ** -0.5
        future = torch.arange(end)[None, :] > torch.arange(end - int(last - first), end)[:, None]
        weights = scores.masked_fill(future[:, None, None, :], float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("thgn,nhd->thgd", weights, values)
    return out


def _flashinfer(config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype) -> Attention:
    made = FlashInferAttention(device, dtype, config.head_dim)
    made.shape(config.heads, config.kv_heads, config.head_dim, page_size)
    return made


def _triton(config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype) -> Attention:
    try:
        from quiesce.engine.gpu import triton_kernel  # noqa: PLC0415
    except ImportError as error:
        raise Unfit(f"is not installed ({_first_line(error)})") from error
    if device.type == "cpu" and not triton_kernel.INTERPRETED:
        raise Unfit("compiles for GPUs; on a CPU it needs TRITON_INTERPRET=1, which is for tests")
    return triton_kernel.TritonAttention()


def _torch(config: ModelConfig, page_size: int, device: torch.device, dtype: torch.dtype) -> Attention:
    return TorchAttention()


Maker = Callable[[ModelConfig, int, torch.device, torch.dtype], Attention]
MAKE: dict[str, Maker] = {"flashinfer": _flashinfer, "triton": _triton, "torch": _torch}


def _first_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__
