"""Draws the tokens of a step: by the native library in one call where there is one, else row by row in numpy.

Both draw alike, and `sampler.sample` says what. The library reads a row of logits once, and then again only where it
has candidates; nothing sorts or weighs a vocabulary in torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import torch

from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.logprobs import token_logprob
from quiesce.engine.native.library import WISH, Library, Peaks
from quiesce.engine.penalties import needs_history, penalised
from quiesce.engine.sampler import GREEDY_BELOW, Sampled, check_sampling, sample, uniform
from quiesce.engine.seats import Seats

KNOWN = 4096  # wishes that are remembered as checked


class Kind(msgspec.Struct, frozen=True):
    """What a request's Sampling comes to at each of its steps."""

    sampling: Sampling
    temperature: float  # 0: greedy
    history: bool  # what came before matters
    changed: bool  # logits are changed before anything is drawn


class Drawer:
    """One engine's, for one thread. `library` None: numpy."""

    def __init__(self, vocab_size: int, eos_ids: Collection[int], library: Library | None) -> None:
        self._vocab_size, self._eos_ids, self._library = vocab_size, eos_ids, library
        self._kinds: dict[int, Kind] = {}  # by the id of a Sampling, which is kept: each step brings the same object

    def kind(self, sampling: Sampling) -> Kind:
        """Raises EngineError for what means nothing to this model."""
        known = self._kinds.get(id(sampling))
        if known is not None:
            return known
        check_sampling(sampling, self._vocab_size, self._eos_ids)
        temperature = 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature
        history = needs_history(sampling)
        if len(self._kinds) >= KNOWN:
            self._kinds.clear()
        made = self._kinds[id(sampling)] = Kind(sampling, temperature, history, history or bool(sampling.logit_bias))
        return made

    def draw_seated(self, seats: Seats, logits: torch.Tensor, peaks: Peaks) -> tuple[np.ndarray, bool]:
        """A token for each seat, whose logits are the first, -1 where they are not finite; whether all are. Needs a
        library."""
        assert self._library is not None
        return self._library.draw_seats(seats.native, logits.data_ptr(), peaks, self._vocab_size)

    def draw(self, rows: Sequence[Row], logits: np.ndarray, peaks: Peaks | None = None) -> list[Sampled | None]:
        """A token for each of `rows`, all of which sample, from float32 [rows, vocab]; None: not finite. `peaks`:
        where they came with the logits."""
        wishes = [row.sample for row in rows if row.sample is not None]
        if self._library is None:
            finite = np.isfinite(logits).all(axis=1)
            return [
                self._plain(*one) if fine else None for *one, fine in zip(rows, wishes, logits, finite, strict=True)
            ]
        kinds = [self._kinds.get(id(wish)) or self.kind(wish) for wish in wishes]
        asked = np.zeros(len(rows), WISH)
        if any(kind.temperature for kind in kinds):
            self._describe(rows, kinds, asked)
        self._library.draw(logits, asked, peaks)
        tokens = asked["token"].tolist()
        for at, kind in enumerate(kinds):
            if kind.changed and tokens[at] >= 0:
                asked["masked"][at] = True
                self._library.draw(self._changed(rows[at], kind.sampling, logits[at])[None], asked[at : at + 1])
                tokens[at] = int(asked["token"][at])
        return [
            None
            if token < 0
            else Sampled(token)
            if wish.logprobs is None
            else Sampled(token, token_logprob(line, token, wish.logprobs))
            for token, wish, line in zip(tokens, wishes, logits, strict=True)
        ]

    def _describe(self, rows: Sequence[Row], kinds: Sequence[Kind], asked: np.ndarray) -> None:
        asked["temperature"] = [kind.temperature for kind in kinds]
        for name in ("top_p", "min_p", "top_k"):
            asked[name] = [getattr(kind.sampling, name) for kind in kinds]
        asked["chance"] = [
            uniform(kind.sampling.seed, row.end) if kind.temperature else 0.0
            for row, kind in zip(rows, kinds, strict=True)
        ]

    def _plain(self, row: Row, wish: Sampling, line: np.ndarray) -> Sampled:
        history, allowed = self._known(row, wish)
        prompt, eos = row.prompt_tokens, self._eos_ids
        return sample(line, wish, row.end, history=history, prompt_tokens=prompt, eos_ids=eos, allowed=allowed)

    def _changed(self, row: Row, wish: Sampling, line: np.ndarray) -> np.ndarray:
        history, allowed = self._known(row, wish)
        return penalised(line, wish, history, row.prompt_tokens, self._eos_ids, allowed)

    @staticmethod
    def _known(row: Row, wish: Sampling) -> tuple[Sequence[int], np.ndarray | None]:
        """What came before, where that matters, and what its grammar lets follow."""
        history = row.known() if needs_history(wish) else ()
        return history, row.grammar.allowed(history, row.prompt_tokens) if wish.grammar and row.grammar else None
