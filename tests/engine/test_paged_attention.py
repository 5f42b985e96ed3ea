"""Paged attention against float64, the Triton kernel in Triton's interpreter; and how a backend is chosen."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from quiesce.engine.batch import Row
from quiesce.engine.config import ModelConfig, read_config
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu import choice, flashinfer_attention
from quiesce.engine.gpu.paged import Attention, TorchAttention
from quiesce.engine.gpu.segments import Segment, segments
from quiesce.engine.gpu.triton_kernel import MOST_SHARES, TritonAttention, shares_of

CPU = torch.device("cpu")
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Shape = tuple[int, int, int, int]  # KV heads, query heads of each, head dimension, page size
CASES: list[tuple[torch.dtype, Shape]] = [
    (torch.float32, (2, 3, 16, 16)),
    (torch.float32, (1, 1, 24, 5)),
    (torch.float32, (1, 7, 64, 1)),
    (torch.float32, (2, 2, 80, 32)),
    (torch.bfloat16, (2, 3, 16, 16)),
    (torch.bfloat16, (1, 9, 64, 3)),
    (torch.float16, (2, 2, 80, 32)),
]


def asked(
    shape: Shape, dtype: torch.dtype, rows: list[tuple[int, int]], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Segment]]:
    """q, k, v and segments for rows of (tokens, start) whose pages lie anywhere in a page-major pool. All that is not
    a key of theirs is NaN: other pages, and the slots of their last pages beyond their ends."""
    kv_heads, group, dim, page_size = shape
    draw = torch.Generator().manual_seed(seed)
    counts = [-(-(tokens + start) // page_size) for tokens, start in rows]
    pages = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    pool = torch.full((sum(counts) + 3, 2, 2, page_size, kv_heads, dim), float("nan"), dtype=dtype)
    made = []
    for (tokens, start), count in zip(rows, counts, strict=True):
        own, pages = pages[:count], pages[count:]
        made.append(Row([0] * tokens, start, own))
        keys = torch.randn((start + tokens, 2, kv_heads, dim), generator=draw).to(dtype)
        for at, key in enumerate(keys):
            pool[own[at // page_size], 1, :, at % page_size] = key
    singles = sum(tokens == 1 for tokens, _ in rows)
    found = segments(made, page_size, singles, CPU)
    fused = torch.randn((found[-1].last, (group + 2) * kv_heads * dim), generator=draw).to(dtype)
    q = fused[:, : group * kv_heads * dim].view(-1, kv_heads, group, dim)
    return q, pool[:, 1, 0], pool[:, 1, 1], found


def error_of(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: list[Segment]) -> float:
    worst = 0.0
    for part in found:
        attention.plan(part)
        own = q[part.first : part.last]
        got = attention.attend(own, k, v, part)
        assert got.is_contiguous() and got.dtype == q.dtype
        worst = max(worst, float((got.double() - choice.exact(own, k, v, part)).abs().max()))
    return worst


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_the_kernel_agrees_with_float64_on_single_tokens_and_chunks(dtype: torch.dtype, shape: Shape) -> None:
    rows = [(1, 0), (1, 69), (2, 0), (33, 40)]
    error = error_of(TritonAttention(), *asked(shape, dtype, rows, seed=shape[2]))
    assert error <= LIMITS[dtype]


@pytest.mark.parametrize("programs", [1, 4, 32])
def test_however_many_shares_a_row_is_cut_into_the_answer_is_the_same(programs: int) -> None:
    """One row of one KV head: 1, 4 and the most shares; of a short row most have no key at all."""
    for end in (1, 131):
        what = asked((1, 3, 16, 4), torch.float32, [(1, end - 1)], seed=end)
        assert error_of(TritonAttention(programs), *what) <= LIMITS[torch.float32]


def test_few_rows_are_cut_into_many_shares_and_many_into_one() -> None:
    assert [shares_of(programs, 264) for programs in (1, 8, 66, 200, 1000)] == [MOST_SHARES, 32, 4, 1, 1]


@pytest.mark.long
def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """To machine code for an NVIDIA and an AMD GPU, as a decode step of a Llama of 8 billion parameters wants it."""
    script = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quiesce.engine.gpu.triton_kernel import _attend
tensors = {name: "*bf16" for name in ("query", "keys", "values", "out")}
tensors |= {"partial": "*fp32", "logs": "*fp32", "tables": "*i32", "ends": "*i32", "offsets": "*i32"}
numbers = dict.fromkeys(("width", "query_token", "page_stride", "slot_stride", "head_stride"), "i32")
fixed = {"heads": 8, "GROUP": 4, "DIM": 128, "PAGE": 16, "ROWS": 16, "TOKENS": 1, "KEYS": 64, "DIMS": 128}
fixed |= {"SHARES": 32, "WIDEN": False}
types = tensors | {"scale": "fp32"} | numbers | dict.fromkeys(fixed, "constexpr")
for target, kind in ((GPUTarget("cuda", 90, 32), "cubin"), (GPUTarget("hip", "gfx942", 64), "hsaco")):
    made = triton.compile(ASTSource(fn=_attend, signature=types, constexprs=fixed), target=target)
    assert made.asm[kind] and made.metadata.shared <= 65536, (target, made.metadata.shared)
"""
    cache = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=150, env=cache)


@pytest.mark.parametrize(("dtype", "shape"), CASES[::2])
def test_plain_pytorch_agrees_with_float64(dtype: torch.dtype, shape: Shape) -> None:
    """It multiplies what lies in free slots by 0, as it may: pages are zeroed when they are begun."""
    q, k, v, found = asked(shape, dtype, [(1, 0), (1, 69), (2, 0), (70, 40)], seed=shape[2])
    assert error_of(TorchAttention(), q, k.nan_to_num(0.0), v.nan_to_num(0.0), found) <= LIMITS[dtype]


# ------------------------------------------------------------ choosing


@pytest.fixture
def config(tiny: Path) -> ModelConfig:
    return read_config(tiny)


def weights(dtype: torch.dtype = torch.float32) -> object:
    return SimpleNamespace(embedding=torch.empty(1, dtype=dtype))


def test_the_best_backend_that_is_here_is_taken_and_the_others_are_accounted_for(config: ModelConfig) -> None:
    chosen = choice.choose("auto", config, 16, weights())  # type: ignore[arg-type]
    assert isinstance(chosen.attention, TritonAttention) and chosen.decode is chosen.attention
    assert chosen.how == f"attention by {TritonAttention.name}; flashinfer runs on CUDA, not on cpu"


class Wrong(TorchAttention):
    name, graphs = "wrong", True

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        return super().attend(q, k, v, segment) * 1.5


def test_a_backend_that_is_wrong_or_fails_on_scratch_memory_is_passed_over_with_its_reason(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Attention:
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setitem(choice.MAKE, "flashinfer", broken)
    monkeypatch.setitem(choice.MAKE, "triton", lambda *_: Wrong())
    chosen = choice.choose("auto", config, 16, weights())  # type: ignore[arg-type]
    assert type(chosen.attention) is TorchAttention and chosen.decode is None
    assert "flashinfer fails on scratch memory: RuntimeError: no kernel image is available;" in chosen.how
    assert "triton is off by " in chosen.how
    with pytest.raises(EngineError, match="triton is off by"):
        choice.choose("triton", config, 16, weights())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="none of auto, flashinfer, triton, torch"):
        choice.choose("xformers", config, 16, weights())  # type: ignore[arg-type]


# ------------------------------------------------------------ FlashInfer, as its documentation describes it


class Documented:
    """Both of its wrappers: what `plan` was told is checked and kept, `run` computes it in float64."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8 and not workspace.any() and layout == "NHD"

    def plan(self, *told: object, causal: bool = False, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        tensors, self.sizes = told[:-4], told[-4:]
        assert all(isinstance(x, torch.Tensor) and x.dtype == torch.int32 for x in tensors)
        begins, self.pages, last = tensors[-3:]  # type: ignore[misc]
        singles = torch.arange(len(begins), dtype=torch.int32)
        assert len(tensors) == (4 if causal else 3) and q_data_type == kv_data_type
        self.offsets = tensors[0] if causal else singles
        self.begins, self.last = begins.tolist(), last.tolist()
        assert all(1 <= count <= self.sizes[3] for count in self.last)  # type: ignore[operator]

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, dim, page_size = self.sizes  # type: ignore[misc]
        assert q.shape[1:] == (heads, dim) and kv[0].shape[1:] == (page_size, kv_heads, dim)
        out = torch.empty_like(q)
        for row, last in enumerate(self.last):
            table = self.pages[self.begins[row] : self.begins[row + 1]]
            end = (len(table) - 1) * page_size + last
            first, after = int(self.offsets[row]), int(self.offsets[row + 1])
            host = (table.numpy()[None], np.array([end]), np.array([0, after - first]))
            part = Segment(0, after - first, table[None], table, table, after - first, host)
            own = q[first:after].view(-1, kv_heads, heads // kv_heads, dim)
            out[first:after] = choice.exact(own, *kv, part).flatten(1, 2)
        return out


def test_flashinfer_is_asked_for_what_its_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("flashinfer")
    vars(library).update(
        BatchDecodeWithPagedKVCacheWrapper=Documented,
        BatchPrefillWithPagedKVCacheWrapper=Documented,
        __version__="0.6",
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE", 1 << 10)
    cuda = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, real=torch.zeros, **k: real(*a, **k))
    made = flashinfer_attention.FlashInferAttention(cuda, torch.bfloat16, 64)  # type: ignore[arg-type]
    made._device = CPU
    made.shape(6, 2, 64, 5)
    assert made.name == "FlashInfer 0.6"
    what = asked((2, 3, 64, 5), torch.bfloat16, [(1, 0), (1, 69), (2, 0), (33, 42)])
    assert error_of(made, *what) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "reason"),
    [
        ("cpu", torch.bfloat16, 64, "runs on CUDA, not on cpu"),
        ("cuda", torch.float32, 64, "no kernel for torch.float32"),
        ("cuda", torch.bfloat16, 80, "head dimension of 80"),
        ("cuda", torch.bfloat16, 64, "is not installed"),
    ],
)
def test_what_flashinfer_cannot_do_is_said(device: str, dtype: torch.dtype, dim: int, reason: str) -> None:
    with pytest.raises(flashinfer_attention.Unfit, match=reason):
        flashinfer_attention.FlashInferAttention(torch.device(device), dtype, dim)


# ------------------------------------------------------------ in the engine


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "meta:"])
def test_a_device_that_is_not_here_is_refused_by_name(device: str, tiny: Path) -> None:
    with pytest.raises(EngineError, match=f"--device {device} cannot be used: "):
        Engine(tiny, pool_pages=8, device=device)


def test_the_engine_says_which_attention_it_runs(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=8, attention="torch")
    assert engine.how == "PyTorch on cpu, attention by PyTorch" and not engine.native
    with pytest.raises(EngineError, match="an attention of its own, not torch"):
        Engine(tiny, pool_pages=8, attention="torch", deterministic=True)
