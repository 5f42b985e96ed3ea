"""Turns the rows of one step into flat index tensors: what to compute, where to write, what to read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from quiesce.core.messages import Sampling
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu.segments import Segment, segments
from quiesce.engine.grammar import Progress
from quiesce.engine.kv import KVPool
from quiesce.engine.penalties import needs_history

MAX_GROUP_TOKENS = 65536  # gathered, padded tokens of one decode group: bounds its scratch memory


class Row(msgspec.Struct):
    """One request's share of a step.

    `tokens` are the new ones to compute, the first at absolute position `start`; everything before must
    already be in `pages`, the page table in logical order that covers start + len(tokens). With `sample`
    the next token, of position start + len(tokens), is drawn; the seed, that position and what is known of
    the request make its randomness and its penalties, so any engine that is given the same draws the same.

    `history` is the request's own list of prompt and answer, `prompt_tokens` of them the prompt: only read,
    only during the step. Sampling with penalties, min_tokens or a grammar needs it up to the end of this row, and
    `prompt_logprobs` (how many alternatives; None: not wanted) the whole prompt: the row then returns
    log-probabilities for those of positions start + 1 to start + len(tokens) that are the prompt's.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: Sampling | None = None
    history: Sequence[int] = ()
    prompt_tokens: int = 0
    prompt_logprobs: int | None = None
    grammar: Progress | None = None  # the answer's own; needed where `sample` names a grammar
    landed: Sequence[int] = ()  # those of `pages` that a transport has filled since the last step

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def scored(self) -> int:
        """How many of the row's tokens are followed by a prompt token whose log-probability is wanted."""
        if self.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, self.prompt_tokens - 1) - self.start)

    def known(self) -> Sequence[int]:
        """The history up to the end of this row; the list itself where it ends there."""
        return self.history if len(self.history) == self.end else self.history[: self.end]


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
    firsts: dict[int, int]  # row -> its first flat token
    segments: list[Segment]  # for paged attention, which needs neither groups nor chunks


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
        _check_history(row, what, config.vocab_size)
        needed = -(-row.end // kv.page_size)
        if len(row.pages) < needed:
            raise EngineError(f"{what} has {len(row.pages)} pages, but {needed} of {kv.page_size} are needed")
        if min(row.pages) < 0 or max(row.pages) >= kv.pages:
            raise EngineError(f"{what} names a page outside 0..{kv.pages - 1}")
        if row.landed and not set(row.landed).issubset(row.pages):
            raise EngineError(f"{what} names landed pages that are not its own")
        for page in row.pages[row.start // kv.page_size : needed]:
            if writer.setdefault(page, number) != number:
                raise EngineError(f"{what} and row {writer[page]} both write page {page}")


def plainly_sound(rows: Sequence[Row], config: ModelConfig, kv: KVPool, context_length: int) -> bool:
    """Whether `check_rows` has nothing to say, for rows of a single token each that bring arrays of pages and no
    history; seen for all at once. False: nothing is known, ask it."""
    tables = [row.pages for row in rows if type(row.pages) is array and len(row.tokens) == 1]
    if len(tables) < len(rows) or not rows or any(row.landed or row.prompt_logprobs is not None for row in rows):
        return False
    starts, tokens = [row.start for row in rows], [row.tokens[0] for row in rows]
    if min(starts) < 0 or max(starts) >= context_length or min(tokens) < 0 or max(tokens) >= config.vocab_size:
        return False
    if any(row.sample is not None and (needs_history(row.sample) or row.sample.grammar) for row in rows):
        return False
    places = [start // kv.page_size for start in starts]
    if any(len(table) <= place for table, place in zip(tables, places, strict=True)):
        return False
    pages = np.frombuffer(b"".join(tables), np.int32)
    written = {table[place] for table, place in zip(tables, places, strict=True)}
    return len(written) == len(rows) and int(pages.min()) >= 0 and int(pages.max()) < kv.pages


def _check_history(row: Row, what: str, vocab_size: int) -> None:
    """Penalties over the wrong tokens are wrong answers that nobody sees, so a row must bring the right ones."""
    drawn = row.sample is not None and needs_history(row.sample)
    if row.sample is not None and row.sample.grammar and row.grammar is None:
        raise EngineError(f"{what} is to be drawn by a grammar that was not compiled")
    if not drawn and row.prompt_logprobs is None:
        return
    if row.prompt_tokens < 1 or (drawn and row.prompt_tokens > row.end):
        raise EngineError(f"{what} says that {row.prompt_tokens} tokens are the prompt's")
    needed = max(row.end if drawn else 0, row.prompt_tokens)
    if len(row.history) < needed:
        raise EngineError(f"{what} has a history of {len(row.history)} tokens, but {needed} are needed")
    if row.end <= len(row.history) and row.history[row.end - 1] != row.tokens[-1]:
        raise EngineError(f"{what} has a history that is not its own: token {row.end - 1} differs")
    if row.scored and not 0 <= row.history[row.start + row.scored] < vocab_size:
        raise EngineError(f"{what} is followed by a prompt token outside 0..{vocab_size - 1}")


def plan(
    rows: Sequence[Row], kv: KVPool, *, deterministic: bool, block: int, device: torch.device, paged: bool = False
) -> Batch:
    """Lay out checked rows: single tokens first, by context length, then chunks.

    `block` is the number of tokens to which what a row reads is padded (a multiple of the page size);
    `deterministic` pads the flat batch to MIN_ROWS; `paged`: for paged attention, over segments.
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
    for at in range(len(singles), 0 if paged else len(order)):
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
        groups=[] if paged else list(_groups([rows[i] for i in singles], kv, block, device)),
        chunks=chunks,
        wanted=tensor(ends[wanted] - 1),
        samplers=[order[at] for at in wanted],
        firsts=dict(zip(order, (ends - lengths).tolist(), strict=True)),
        segments=segments([rows[i] for i in order], kv.page_size, len(singles), device) if paged else [],
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
