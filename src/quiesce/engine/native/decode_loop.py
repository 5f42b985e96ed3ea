"""A thread that makes steps of seats without Python: it gets the interpreter's lock for nothing between two of them.

The step is the same as `Engine.run_seated` of seats alone. One that cannot be made, or not for everyone, is left to
that: to make a step again writes the same, and it says what is the matter.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import Structure, byref, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch

from quiesce.engine.errors import EngineError
from quiesce.engine.native.library import BEST, FOLDER, UNDER, Bounds, Library, Peaks
from quiesce.engine.seats import Seats

log = logging.getLogger("quiesce.engine")

FILE = FOLDER / "_decode.so"
PLACES = 32  # of seats, made at a time
CALLS = ("quiesce_sound", "quiesce_forward", "quiesce_logits", "quiesce_draw_seats")


class Desk(Structure):
    """As in decode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in CALLS),
        *((name, c_void_p) for name in ("stepper", "pool", "seats")),
        ("bounds", Bounds),
        *((name, c_void_p) for name in ("tokens", "hidden", "logits", "peaks", "bests", "drawn")),
        ("wanted", c_int64),
        *((name, c_int32) for name in ("begin", "done")),
    )


@cache
def calls() -> Any | None:
    """None, and a word in the log: it was not built."""
    if not FILE.is_file():
        log.warning("%s was not built: steps go through Python, which costs 0.1 ms each; install Quiesce again", FILE)
        return None
    found = ctypes.CDLL(str(FILE))
    for name, arguments in (("quiesce_desk_bytes", ()), ("quiesce_decode", (c_void_p,))):
        getattr(found, name).restype, getattr(found, name).argtypes = c_int64, arguments
    if found.quiesce_desk_bytes() != ctypes.sizeof(Desk):
        raise EngineError(f"{FILE} belongs to another version of Quiesce; install Quiesce again")
    return found


class DecodeLoop:
    """`run` is one thread's, everything else another's, which leaves the seats alone between `begin` and `done`."""

    def __init__(self, to: Library, stepper: int, pool: torch.Tensor, bounds: Bounds, hidden: int, done: int) -> None:
        """`pool` and `bounds` of the engine; `hidden`: its states' size; `done`: an eventfd, written after a step."""
        self._pool, self._bounds, self._hidden_size = pool, bounds, hidden
        self._places = 0
        self._drawn = np.empty(0, np.int64)
        self.desk = Desk(stepper=stepper, pool=pool.data_ptr(), bounds=bounds, done=done)
        for name in CALLS:
            setattr(self.desk, name, ctypes.cast(getattr(to.calls, name), c_void_p))
        self.desk.begin = os.eventfd(0, os.EFD_CLOEXEC)

    def begin(self, seats: Seats) -> bool:
        """Starts a step of all who sit. False: not one for this loop."""
        if not seats.within(self._bounds.pages):
            return False
        if len(seats) > self._places:
            self._make_places(-(-len(seats) // PLACES) * PLACES)
        self.desk.seats = ctypes.addressof(seats.native)
        self._wake(1)
        return True

    def drawn(self, count: int) -> np.ndarray:
        """The tokens of the step that has ended, by seat."""
        return self._drawn[:count].copy()

    def interrupt(self) -> None:
        """`run` returns."""
        self._wake(0)

    def _wake(self, wanted: int) -> None:
        self.desk.wanted = wanted
        os.eventfd_write(self.desk.begin, 1)

    def run(self) -> bool:
        """Makes steps as they are wanted. True: one failed, and `done` has not been written; False: interrupted."""
        built = calls()
        assert built is not None
        outcome = built.quiesce_decode(byref(self.desk))
        if outcome < 0:
            raise OSError(-outcome, os.strerror(-outcome))
        return bool(outcome)

    def close(self) -> None:
        """After the last `run`."""
        os.close(self.desk.begin)

    def _make_places(self, count: int) -> None:
        """They stay from step to step: new memory for the logits of many rows would be cleared by the kernel."""
        self._places, vocab = count, self._bounds.vocab
        self._drawn, self._tokens = np.empty(count, np.int64), np.empty(count, np.int32)
        self._hidden = torch.empty((count, self._hidden_size))
        self._logits, self._peaks = self.results(count, vocab)
        self.desk.drawn, self.desk.tokens = self._drawn.ctypes.data, self._tokens.ctypes.data
        self.desk.hidden, self.desk.logits = self._hidden.data_ptr(), self._logits.data_ptr()
        self.desk.peaks, self.desk.bests = self._peaks.blocks.ctypes.data, self._peaks.bests.ctypes.data

    def results(self, count: int, vocab: int) -> tuple[torch.Tensor, Peaks]:
        """Memory for the logits of a step, and their peaks."""
        blocks = np.empty((count, -(-vocab // UNDER)), np.float32)
        return torch.empty((count, vocab)), Peaks(blocks, np.empty(count, BEST))
