"""Answers that are in full flow: each gets one token a step, and a step costs none of them any Python of its own.

Whoever sits here has one lease for as long as it sits, not one for each step (guard D2). It is opened before the
first step that writes its pages and closed when it leaves, or, when it leaves in the middle of a step, at the end of
that. So while a step is under way, everyone whose pages it writes has an open lease, and their pages go nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quiesce.core.ledger import Ledger
from quiesce.engine.seats import Seats
from quiesce.roles.sequence import Outcome, Sequence

NO_TOKEN = -1


@dataclass(frozen=True)
class Hearers:
    """Called when a step has ended: with the tokens of those who sit, seat by seat, and for each that is finished."""

    streamed: Callable[[list[Sequence], list[int]], None]
    finished: Callable[[Sequence, Outcome], None]


class Running:
    def __init__(self, ledger: Ledger, most: int, page_size: int, hearers: Hearers) -> None:
        self.ledger = ledger
        self.seats = Seats(most, page_size)
        self.hearers = hearers
        self.sequences: list[Sequence] = []  # by seat
        self.under_way = False
        self._leaving: list[Sequence] = []  # in the middle of a step
        self._histories: list[list[int]] = []
        self._last = np.zeros(most, np.int64)  # where each answer's last token is computed, at max_tokens
        self._soonest: int | None = 0  # steps until the first of them; None: to be reckoned
        self._stops = np.full((most, 1), NO_TOKEN, np.int64)  # the tokens that end each answer

    def __len__(self) -> int:
        return len(self.sequences)

    # ------------------------------------------------------------ who sits

    def sit(self, sequence: Sequence) -> None:
        """Between steps. All but its last token is computed."""
        assert not self.under_way and sequence.seat is None
        self.ledger.lend(sequence.lease)
        wish = sequence.sampling
        seat = sequence.seat = self.seats.take(sequence.tokens, sequence.prompt_tokens, wish, sequence.pages)
        self.sequences.append(sequence)
        self._histories.append(sequence.tokens)
        self._last[seat] = sequence.prompt_tokens + wish.max_tokens - 2
        self._soonest = None
        ends = sequence.stopping
        if len(ends) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(ends)), NO_TOKEN, np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[seat] = NO_TOKEN
        self._stops[seat, : len(ends)] = ends

    def leave(self, sequence: Sequence) -> None:
        """It takes part in no further step. A step under way still writes its pages: its lease stays until then."""
        if sequence.seat is None:
            return
        if self.under_way:
            if sequence not in self._leaving:
                self._leaving.append(sequence)
        else:
            self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        seat, sequence.seat = sequence.seat, None
        assert seat is not None and self.sequences[seat] is sequence
        last, history = self.sequences.pop(), self._histories.pop()
        moved = self.seats.leave(seat)
        if moved is not None:
            self.sequences[seat], self._histories[seat], last.seat = last, history, seat
            self._last[seat], self._stops[seat] = self._last[moved], self._stops[moved]
        self._soonest = None
        self.ledger.close(sequence.lease, sequence.completed)

    def grow(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        if sequence.seat is not None:
            self.seats.add_pages(sequence.seat, pages)

    def short(self) -> list[Sequence]:
        """Those whose next token has no page to go to."""
        return [self.sequences[seat] for seat in self.seats.short()]

    # ------------------------------------------------------------ a step has ended

    def ended(self, tokens: np.ndarray, errors: dict[int, Exception]) -> list[tuple[Sequence, Exception]]:
        """`tokens` by seat. Returns those for whom the step failed, who sit no more."""
        self.under_way = False
        failed = [(self.sequences[seat], error) for seat, error in errors.items()]
        for sequence in {id(s): s for s in (*self._leaving, *(s for s, _ in failed))}.values():
            seat = sequence.seat
            assert seat is not None
            tokens[seat] = tokens[len(self) - 1]
            self._vacate(sequence)
        failed = [(sequence, error) for sequence, error in failed if not sequence.ended]
        self._leaving.clear()
        self._apply(tokens[: len(self)])
        return failed

    def _apply(self, tokens: np.ndarray) -> None:
        n = len(self)
        if not n:
            return
        last = self._at_last()
        self.seats.advance(tokens)
        drawn = tokens.tolist()
        deque(map(list.append, self._histories, drawn), maxlen=0)
        stopped = self._stops[:n] == tokens[:, None]
        over: list[int] = []
        if last or stopped.any():
            stopped = stopped.any(axis=1)
            at_last = self._last[:n] < self.seats.starts
            over = (stopped | at_last).nonzero()[0].tolist()
        self.hearers.streamed(self.sequences, drawn)
        for sequence, stop in [(self.sequences[seat], stopped[seat]) for seat in over]:
            self.hearers.finished(sequence, "stop" if stop else "length")

    def _at_last(self) -> bool:
        """Whether this step's token is the last that somebody may have."""
        if self._soonest is None:
            self._soonest = int((self._last[: len(self)] - self.seats.starts).min())
        self._soonest -= 1
        return self._soonest < 0
