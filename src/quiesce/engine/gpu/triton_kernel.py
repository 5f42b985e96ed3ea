"""Paged attention in Triton: one kernel for prompts and for single tokens, over pages as they lie in the pool.

A program takes some query rows (tokens x the query heads that share a KV head), one KV head and, where a row has one
token, one share of its keys; shares are merged by a second kernel. Sums and softmax are float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quiesce.engine.gpu.segments import Segment

INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2E = 1.4426950408889634
PROMPT_ROWS = 64  # query rows of a program where rows have many tokens
PROGRAMS = 8 if INTERPRETED else 264  # wanted at once: two for each multiprocessor of a large GPU
MOST_SHARES = 32


@triton.jit
def _attend(  # noqa: PLR0915
    query,
    keys,
    values,
    out,
    partial,
    logs,
    tables,
    ends,
    offsets,
    scale,
    width,
    query_token,
    page_stride,
    slot_stride,
    head_stride,
    heads: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SHARES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    row, share = tl.program_id(2) // SHARES, tl.program_id(2) % SHARES
    first = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    end = tl.load(ends + row)
    if tile * TOKENS >= count:
        return
    line = tl.arange(0, ROWS)
    token, member = tile * TOKENS + line // GROUP, line % GROUP
    live = (line < TOKENS * GROUP) & (token < count)
    dim = tl.arange(0, DIMS)
    inside = dim < DIM
    places = (head * GROUP + member)[:, None] * DIM + dim[None, :]
    flat = (first + token).to(tl.int64)[:, None]
    shown = live[:, None] & inside[None, :]
    q = tl.load(query + flat * query_token + places, mask=shown, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    position = end - count + token
    reach = tl.minimum(end, end - count + (tile + 1) * TOKENS)
    span = tl.cdiv(tl.cdiv(reach, KEYS), SHARES) * KEYS
    low = share * span
    high = tl.minimum(low + span, reach)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = key < high
        page = tl.load(tables + row * width + key // PAGE, mask=seen, other=0).to(tl.int64)
        at = page * page_stride + (key % PAGE) * slot_stride + head * head_stride
        k = tl.load(keys + at[None, :] + dim[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
        v = tl.load(values + at[:, None] + dim[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)  # nothing seen yet: exp2(-inf - 0) = 0, never a NaN
        weights = tl.exp2(scores - base[:, None])
        carried = tl.exp2(best - base)
        total = total * carried + tl.sum(weights, 1)
        result = result * carried[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = peak
    some = tl.where(total == 0.0, 1.0, total)
    result = result / some[:, None]
    if SHARES == 1:
        tl.store(out + flat * (heads * GROUP * DIM) + places, result.to(out.dtype.element_ty), mask=shown)
    else:
        slot = ((row * heads + head) * SHARES + share) * GROUP + member
        tl.store(partial + slot.to(tl.int64)[:, None] * DIM + dim[None, :], result, mask=shown)
        tl.store(logs + slot, tl.where(total == 0.0, float("-inf"), best + tl.log2(some)), mask=live)


@triton.jit
def _merge(
    partial,
    logs,
    out,
    heads: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIMS: tl.constexpr,
    SHARES: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    member, dim = tl.arange(0, MEMBERS), tl.arange(0, DIMS)
    live = member < GROUP
    shown = live[:, None] & (dim < DIM)[None, :]
    best = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    result = tl.zeros([MEMBERS, DIMS], tl.float32)
    for share in range(SHARES):
        slot = ((row * heads + head) * SHARES + share) * GROUP + member
        log = tl.load(logs + slot, mask=live, other=float("-inf"))
        value = tl.load(partial + slot.to(tl.int64)[:, None] * DIM + dim[None, :], mask=shown, other=0.0)
        peak = tl.maximum(best, log)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        carried, weight = tl.exp2(best - base), tl.exp2(log - base)
        total = total * carried + weight
        result = result * carried[:, None] + value * weight[:, None]
        best = peak
    some = tl.where(total == 0.0, 1.0, total)
    places = (row.to(tl.int64) * heads + head) * GROUP * DIM + member[:, None] * DIM + dim[None, :]
    tl.store(out + places, (result / some[:, None]).to(out.dtype.element_ty), mask=shown)


class TritonAttention:
    """On any GPU that Triton compiles for; on a CPU in Triton's interpreter, where TRITON_INTERPRET=1 was set before
    triton was loaded. It reads what is on the device alone, so a graph may hold it."""

    name = f"Triton {triton.__version__}" + (" (interpreted)" if INTERPRETED else "")
    graphs = True

    def __init__(self, programs: int = PROGRAMS) -> None:
        self._programs = programs

    def plan(self, segment: Segment) -> None:
        """Nothing is prepared on the host."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        """As `paged.Attention.attend`. Any page size and head dimension; float32, bfloat16 or float16."""
        tokens, heads, group, dim = q.shape
        rows, page = segment.tables.shape[0], k.shape[1]
        out = torch.empty((tokens, heads, group, dim), dtype=q.dtype, device=q.device)
        single = segment.longest == 1
        lines = max(16, triton.next_power_of_2(group)) if single else max(PROMPT_ROWS, triton.next_power_of_2(group))
        per_tile = 1 if single else lines // group
        shares = shares_of(rows * heads, self._programs) if single else 1
        wide = q.dtype == torch.float32
        dims = max(16, triton.next_power_of_2(dim))
        partial = logs = out
        if shares > 1:
            partial = torch.empty((rows, heads, shares, group, dim), dtype=torch.float32, device=q.device)
            logs = torch.empty((rows, heads, shares, group), dtype=torch.float32, device=q.device)
        _attend[(triton.cdiv(segment.longest, per_tile), heads, rows * shares)](
            *(q, k, v, out, partial, logs, segment.tables, segment.ends, segment.offsets),
            dim**-0.5 * LOG2E,
            segment.tables.stride(0),
            q.stride(0),
            *k.stride()[:3],
            heads=heads,
            GROUP=group,
            DIM=dim,
            PAGE=page,
            ROWS=lines,
            TOKENS=per_tile,
            KEYS=64 if not wide and dims <= 128 else 32 if not wide or dims <= 128 else 16,
            DIMS=dims,
            SHARES=shares,
            WIDEN=wide or INTERPRETED,  # the interpreter multiplies no bfloat16
        )
        if shares > 1:
            members = triton.next_power_of_2(group)
            _merge[(rows, heads)](
                *(partial, logs, out),
                heads=heads,
                GROUP=group,
                DIM=dim,
                MEMBERS=members,
                DIMS=dims,
                SHARES=shares,
            )
        return out


def shares_of(programs: int, wanted: int) -> int:
    """Into how many shares a row's keys are cut so that few rows still fill the device: a power of two."""
    wanted = max(1, min(MOST_SHARES, wanted // programs))
    return 1 << (wanted.bit_length() - 1)
