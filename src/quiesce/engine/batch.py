"""Turns the rows of one step into flat index tensors: what to compute, where to write, what to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quiesce.core.messages import Sampling
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.kv import KVPool

MAX_GROUP_TOKENS = 65536  # gathered, padded tokens of one decode group: bounds its scratch memory


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    `tokens` are the new ones to compute, the first at absolute position `start`; everything before must
    already be in `pages`, the page table in logical order that covers start + len(tokens). With `sample`
    the next token, of position start + len(tokens), is drawn; that position and the seed alone make its
    randomness. `logprob` asks for the natural log-probability of that token as the model gave it (before
    temperature, top-k and top-p).
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: Sampling | None = None
    logprob: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one new token each, at flat tokens first..last, padded to the same number of pages."""

    first: int
    last: int
    halves: torch.Tensor  # for KVPool.gather
    hidden: torch.Tensor  # bool [rows, 1, 1, tokens]: keys past the row's end
    bias: torch.Tensor  # float32, -inf where hidden, else 0


@dataclass(frozen=True)
class Chunk:
    """Two or more new tokens of one row, at flat tokens first..last and absolute position `start`."""

    first: int
    last: int
    start: int
    halves: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """`n` real tokens come first; `tokens` and `positions` may be padded beyond. All indexes are int64."""

    n: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor  # [n, 2], for KVPool.write
    cleared: torch.Tensor  # pages begun in this step
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    wanted: torch.Tensor  # flat tokens whose logits are needed
    samplers: list[int]  # the row each wanted token belongs to


def check_rows(rows: Sequence[Row], config: ModelConfig, kv: KVPool, context_length: int) -> None:
    """Raises EngineError for the first row that would compute nonsense or touch another row's pages."""
    writer: dict[int, int] = {}
    for number, row in enumerate(rows):
        what = f"row {number} (start {row.start}, {len(row.tokens)} tokens)"
        if not row.tokens or row.start < 0:
            raise EngineError(f"{what} has nothing to compute or starts before 0")
        if min(row.tokens) < 0 or max(row.tokens) >= config.vocab_size:
            raise EngineError(f"{what} has a token outside 0..{config.vocab_size - 1}")
        if row.end > context_length:
            raise EngineError(f"{what} ends past the context length of {context_length}")
        needed = -(-row.end // kv.page_size)
        if len(row.pages) < needed:
            raise EngineError(f"{what} has {len(row.pages)} pages, but {needed} of {kv.page_size} are needed")
        if min(row.pages) < 0 or max(row.pages) >= kv.pages:
            raise EngineError(f"{what} names a page outside 0..{kv.pages - 1}")
        for page in row.pages[row.start // kv.page_size : needed]:
            if writer.setdefault(page, number) != number:
                raise EngineError(f"{what} and row {writer[page]} both write page {page}")


def plan(rows: Sequence[Row], kv: KVPool, *, deterministic: bool, block: int, device: torch.device) -> Batch:
    """Lay out checked rows: single tokens first, by context length, then chunks.

    `block` is the number of tokens to which what a row reads is padded (a multiple of the page size);
    `deterministic` pads the flat batch to MIN_ROWS.
    """
    singles = sorted((i for i, row in enumerate(rows) if len(row.tokens) == 1), key=lambda i: rows[i].start)
    order = singles + [i for i, row in enumerate(rows) if len(row.tokens) > 1]
    lengths = np.array([len(rows[i].tokens) for i in order])
    ends = np.cumsum(lengths)
    n = int(ends[-1])
    tokens = np.concatenate([np.asarray(rows[i].tokens, np.int64) for i in order])
    positions = np.concatenate([np.arange(rows[i].start, rows[i].end) for i in order])
    pages = np.concatenate(
        [np.asarray(rows[i].pages, np.int64)[np.arange(rows[i].start, rows[i].end) // kv.page_size] for i in order]
    )
    slots = positions % kv.page_size
    padding = max(0, MIN_ROWS - n) if deterministic else 0

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    chunks = []
    for at in range(len(singles), len(order)):
        row, last = rows[order[at]], int(ends[at])
        table = _tables([row], kv.page_size, block)
        chunks.append(Chunk(last - len(row.tokens), last, row.start, tensor(kv.half_index(table))))
    wanted = [at for at, i in enumerate(order) if rows[i].sample is not None]
    return Batch(
        n=n,
        tokens=tensor(np.pad(tokens, (0, padding))),
        positions=tensor(np.pad(positions, (0, padding))),
        slots=tensor(kv.slot_index(pages, slots)),
        cleared=tensor(pages[slots == 0]),
        groups=list(_groups([rows[i] for i in singles], kv, block, device)),
        chunks=chunks,
        wanted=tensor(ends[wanted] - 1),
        samplers=[order[at] for at in wanted],
    )


MIN_ROWS = 4  # torch's matrix kernels round 1 to 3 rows differently from any larger number


def _tables(rows: Sequence[Row], page_size: int, block: int) -> np.ndarray:
    """Page tables [rows, pages], padded with each row's own first page: whatever is read is its own."""
    tokens = -(-max(row.end for row in rows) // block) * block
    table = np.empty((len(rows), tokens // page_size), np.int64)
    for line, row in zip(table, rows, strict=True):
        used = -(-row.end // page_size)
        line[:used] = row.pages[:used]
        line[used:] = row.pages[0]
    return table


def _groups(rows: Sequence[Row], kv: KVPool, block: int, device: torch.device) -> Iterator[DecodeGroup]:
    """Cut rows, sorted by length, where padding would more than double the shortest or exceed the bound."""
    first = 0
    for last in range(1, len(rows) + 1):
        if last < len(rows):
            longest = -(-rows[last].end // block) * block
            shortest = -(-rows[first].end // block) * block
            if longest <= 2 * shortest + 128 and (last + 1 - first) * longest <= MAX_GROUP_TOKENS:
                continue
        members = rows[first:last]
        table = _tables(members, kv.page_size, block)
        ends = np.array([row.end for row in members])
        hidden = np.arange(table.shape[1] * kv.page_size)[None, :] >= ends[:, None]
        halves = torch.from_numpy(kv.half_index(table)).to(device)
        mask = torch.from_numpy(hidden[:, None, None, :]).to(device)
        bias = torch.zeros(mask.shape, device=device).masked_fill_(mask, float("-inf"))
        yield DecodeGroup(first, last, halves, mask, bias)
        first = last
