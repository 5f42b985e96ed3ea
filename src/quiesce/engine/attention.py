"""Attention over gathered keys and values; query heads of one KV head are taken as more query rows.

Two ways: the fast one, and an exact one whose bits for a query depend on that query's own keys alone.
Shapes: G query heads share each of KH KV heads of dimension D; T queries, S keys, B rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quiesce.engine.batch import MIN_ROWS

TILE = 64  # queries at a time: keeps scores in cache, and skips most of what causality hides
EXACT_BLOCK = 64  # keys whose contributions are summed together, at fixed absolute places
HIDDEN = float("-inf")


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One query a row: q [B, KH, G, D], k and v [B, S, KH, D], bias float32 [B, 1, 1, S] -> [B, KH, G, D]."""
    return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Causal: q [T, KH, G, D] at positions start.., k and v [start + T, KH, D] -> [T, KH, G, D].

    Scores and softmax are float32. One KV head at a time, because a tile's scores then stay in cache.
    """
    tokens, kv_heads, group, dim = q.shape
    queries = (q.float() * dim**-0.5).permute(1, 0, 2, 3)
    keys, values = k.float().permute(1, 2, 0), v.transpose(0, 1)
    out = torch.empty_like(q)
    for a in range(0, tokens, TILE):
        b = min(a + TILE, tokens)
        n, seen = b - a, start + b
        future = torch.full((n, n), HIDDEN, device=q.device).triu_(1)[:, None]
        for head in range(kv_heads):
            scores = torch.mm(queries[head, a:b].reshape(n * group, dim), keys[head, :, :seen])
            scores.view(n, group, seen)[..., start + a :].add_(future)
            weights = torch.softmax(scores, -1).to(q.dtype)
            out[a:b, head] = torch.mm(weights, values[head, :seen]).view(n, group, dim)
    return out


def exact_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """As `decode`, bit for bit what `exact_prefill` gives; S is a multiple of EXACT_BLOCK."""
    rows, kv_heads, group, dim = q.shape
    keys, values = (x.float().transpose(1, 2).reshape(rows * kv_heads, -1, dim) for x in (k, v))
    mask = hidden.expand(rows, kv_heads, 1, -1).reshape(rows * kv_heads, 1, -1)
    out = _exact(q.float().reshape(rows * kv_heads, group, dim), keys, values, mask)
    return out.view(rows, kv_heads, group, dim).to(q.dtype)


def exact_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """As `prefill`, but k and v go on to the next multiple of EXACT_BLOCK (finite, not used)."""
    tokens, kv_heads, group, dim = q.shape
    keys, values = (x.float().transpose(0, 1).contiguous() for x in (k, v))
    out = torch.empty_like(q)
    for a in range(0, tokens, TILE):
        b = min(a + TILE, tokens)
        seen = -(-(start + b) // EXACT_BLOCK) * EXACT_BLOCK
        ends = torch.arange(start + a + 1, start + b + 1, device=q.device).repeat_interleave(group)
        mask = torch.arange(seen, device=q.device) >= ends[:, None]
        queries = q[a:b].float().transpose(0, 1).reshape(kv_heads, (b - a) * group, dim)
        tile = _exact(queries, keys[:, :seen], values[:, :seen], mask)
        out[a:b] = tile.view(kv_heads, b - a, group, dim).transpose(0, 1)
    return out


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """q [N, M, D], k and v [N, S, D], hidden broadcast to [N, M, S], all float32 -> [N, M, D].

    The maximum is exact in any order; sums are taken block by block and added in the order of blocks, so a
    block that is hidden adds exact zeros, and how many of them follow changes nothing.
    """
    n, rows, dim = q.shape
    q = F.pad(q * dim**-0.5, (0, 0, 0, max(0, MIN_ROWS - rows)))
    scores = torch.bmm(q, k.transpose(1, 2))
    scores[:, :rows].masked_fill_(hidden, HIDDEN)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    blocks = scores.view(n, q.shape[1], -1, EXACT_BLOCK)
    sums = blocks.sum(-1)
    products = torch.bmm(
        blocks.transpose(1, 2).reshape(-1, q.shape[1], EXACT_BLOCK), v.reshape(-1, EXACT_BLOCK, dim)
    ).view(n, -1, q.shape[1], dim)
    total, out = sums[..., 0].clone(), products[:, 0].clone()
    for block in range(1, products.shape[1]):
        total += sums[..., block]
        out += products[:, block]
    return out.div_(total.unsqueeze(-1))[:, :rows]
