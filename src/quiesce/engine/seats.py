"""Rows that are computed a token at a time, step after step, kept as arrays: what a step needs of them is there
already, and only what changes from step to step is touched.

Seats 0 to n - 1 are taken, with no gap: whoever leaves is replaced by the last. An engine reads them during a step,
so they change between steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.config import ModelConfig
from quiesce.engine.errors import EngineError
from quiesce.engine.kv import KVPool
from quiesce.engine.native import library
from quiesce.engine.native.library import ROW_FIELDS, WISH, Library
from quiesce.engine.penalties import needs_history
from quiesce.engine.sampler import GREEDY_BELOW, MASK

NARROWEST = 8  # pages of the table of a seat


def can_sit(sampling: Sampling) -> bool:
    """Whether a token is drawn from the logits as they are, and only the token is wanted."""
    return not needs_history(sampling) and not sampling.logit_bias and sampling.logprobs is None


@dataclass(frozen=True)
class Sitter:
    """What of a seat is no number: `history` is the request's own list, which ends with the token to compute."""

    history: Sequence[int]
    prompt_tokens: int
    sampling: Sampling


class Seats:
    def __init__(self, most: int, page_size: int) -> None:
        self.page_size = page_size
        self._n = 0
        self._sitters: list[Sitter] = []
        self._token = np.zeros(most, np.int64)
        self._rows = np.zeros((most, ROW_FIELDS), np.int64)  # as the native step takes them: count, start, table
        self._rows[:, 0] = 1
        self._held = np.zeros(most, np.int64)  # pages
        self._seed = np.zeros(most, np.uint64)
        self._wishes = np.zeros(most, WISH)
        self._pages = np.zeros((most, NARROWEST), np.int32)
        self.native = library.Seats(
            page_size=page_size,
            tokens=self._token.ctypes.data,
            rows=self._rows.ctypes.data,
            held=self._held.ctypes.data,
            seeds=self._seed.ctypes.data,
            wishes=self._wishes.ctypes.data,
        )
        self._place_tables()
        self._room: int | None = None  # steps until somebody is short of a page; None: to be reckoned
        self.lowest_page = self.highest_page = 0  # that a seat has ever had

    def __len__(self) -> int:
        return self._n

    # ------------------------------------------------------------ who sits

    def take(self, history: Sequence[int], prompt_tokens: int, sampling: Sampling, pages: Sequence[int]) -> int:
        """A seat for a request of which all but the last token is computed."""
        at = self._n
        self._n += 1
        self._sitters.append(Sitter(history, prompt_tokens, sampling))
        self._token[at], self._rows[at, 1] = history[-1], len(history) - 1
        self._held[at] = 0
        self._seed[at] = sampling.seed & MASK
        wish = self._wishes[at]
        wish["temperature"] = 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature
        wish["top_p"], wish["min_p"], wish["top_k"] = sampling.top_p, sampling.min_p, sampling.top_k
        wish["chance"], wish["masked"] = 0.0, 0
        self.native.count = self._n
        self.add_pages(at, pages)
        return at

    def leave(self, seat: int) -> int | None:
        """The seat is free, and whoever sat last sits there now: that one's former seat, or None."""
        self._n -= 1
        self._room, self.native.count = None, self._n
        last, sitter = self._n, self._sitters.pop()
        if seat == last:
            return None
        self._sitters[seat] = sitter
        for each in (self._token, self._held, self._seed, self._wishes, self._pages):
            each[seat] = each[last]
        self._rows[seat, 1] = self._rows[last, 1]
        return last

    def add_pages(self, seat: int, pages: Sequence[int]) -> None:
        held = int(self._held[seat])
        most = held + len(pages)
        if most > self._pages.shape[1]:
            wider = np.zeros((len(self._pages), max(most, 2 * self._pages.shape[1])), np.int32)
            wider[:, : self._pages.shape[1]] = self._pages
            self._pages = wider
            self._place_tables()
        self._pages[seat, held:most] = pages
        self.lowest_page, self.highest_page = min(self.lowest_page, *pages), max(self.highest_page, *pages)
        self._held[seat] = most
        self._room = None

    def within(self, pages: int) -> bool:
        """Whether no seat has ever had a page outside a pool of so many."""
        return self.lowest_page >= 0 and self.highest_page < pages

    def _place_tables(self) -> None:
        self._rows[:, 2] = np.arange(len(self._rows)) * self._pages.shape[1]
        self.native.pages = self._pages.ctypes.data

    # ------------------------------------------------------------ from step to step

    def short(self) -> list[int]:
        """The seats whose next token has no page to go to."""
        if not self._n:
            return []
        if self._room is None:
            self._room = int((self._held[: self._n] * self.page_size - self.starts).min())
        if self._room > 0:
            return []
        found: list[int] = (self.starts >= self._held[: self._n] * self.page_size).nonzero()[0].tolist()
        return found

    def advance(self, tokens: np.ndarray) -> None:
        """A step has computed everyone's token and drawn the next."""
        self._token[: self._n] = tokens
        self._rows[: self._n, 1] += 1
        if self._room is not None:
            self._room -= 1

    # ------------------------------------------------------------ what a step reads

    @property
    def tokens(self) -> np.ndarray:
        return self._token[: self._n]

    @property
    def starts(self) -> np.ndarray:
        return self._rows[: self._n, 1]

    @property
    def described(self) -> np.ndarray:
        """int64 [n, ROW_FIELDS], whose tables are in `tables`."""
        return self._rows[: self._n]

    @property
    def tables(self) -> np.ndarray:
        """int32, flat: the page tables of all seats, each as wide."""
        return self._pages[: self._n].reshape(-1)

    def rows(self) -> list[Row]:
        """The same as rows of their own, for whatever takes no arrays."""
        return [
            Row(
                tokens=[token],
                start=start,
                pages=self._pages[at, : self._held[at]].tolist(),
                sample=sitter.sampling,
                history=sitter.history,
                prompt_tokens=sitter.prompt_tokens,
            )
            for at, (sitter, token, start) in enumerate(
                zip(self._sitters, self.tokens.tolist(), self.starts.tolist(), strict=True)
            )
        ]


def check_seats(
    seats: Seats, rows: Sequence[Row], config: ModelConfig, kv: KVPool, context_length: int, by: Library
) -> None:
    """As `batch.check_rows`, of all at once; `rows` are sound among themselves. Raises EngineError."""
    if not seats.within(kv.pages):
        raise EngineError(f"a seat names a page outside 0..{kv.pages - 1}")
    others = [page for row in rows for page in {*row.pages[row.start // kv.page_size : -(-row.end // kv.page_size)]}]
    bounds = library.Bounds(config.vocab_size, context_length, kv.pages)
    if not by.sound(seats.native, bounds, np.array(others, np.int64)):
        raise EngineError(_unsound(seats, config, context_length))


def _unsound(seats: Seats, config: ModelConfig, context_length: int) -> str:
    """What is the matter with them."""
    starts, tokens = seats.starts, seats.tokens
    if starts.min() < 0 or starts.max() >= context_length:
        return f"a seat's token is past the context length of {context_length}"
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        return f"a seat has a token outside 0..{config.vocab_size - 1}"
    if seats.short():
        return f"seats {seats.short()} have no page for their token"
    return "two of a step's seats and rows write one page"
