"""The threads that own agents: a `Courier` posts through one, a `Keeper` makes and ends those that are lent.

A thread is told what to do through a queue and tells what happened through `Told`, which wakes the transport. Nothing
here decides anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from quiesce.transfer.agent import TRIAL_BYTES, Direction, Engine, Far, Lending, Posting
from quiesce.transfer.interface import Arena
from quiesce.transfer.window import Window

log = logging.getLogger("quiesce.transfer")

# Seconds between looks: busy looking starves an engine's own thread. The share is of the time waited until now: so an
# end is seen little later than it could have been.
_POLL_FIRST, _POLL_MOST, _POLL_SHARE = 0.0001, 0.002, 1 / 32
GIVE_UP_SECONDS = 20.0  # after the end of an attachment, where an engine may never tell the end of what was posted
NEVER = 1 << 63  # beyond any generation


class Told:
    """Calls from other threads, made by the transport's own thread when it turns."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def tell(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        os.eventfd_write(self.flag, 1)

    def turn(self) -> None:
        try:
            os.eventfd_read(self.flag)
        except BlockingIOError:
            return
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()


@dataclass(eq=False)
class Batch:
    """One operation of the engine. `own` and `theirs` are page numbers, int64 [n]."""

    direction: Direction
    own: np.ndarray
    theirs: np.ndarray


@dataclass(frozen=True)
class Joined:
    """Where the lender's agent is, and what it must be shown."""

    far: Far
    trial: bytes
    generation: int


class CourierOwner:
    """What a courier tells, in the transport's thread."""

    def joined(self, courier: Courier) -> None: ...
    def placed(self, courier: Courier, batch: Batch) -> None: ...
    def lost(self, courier: Courier, batch: Batch, started: bool, reason: str) -> None: ...
    def flushed(self, courier: Courier) -> None:
        """Everything that was lost on it has landed: it can be used on."""

    def broken(self, courier: Courier, reason: str) -> None:
        """It takes no more batches. Those under way are still told of."""

    def courier_ended(self, courier: Courier, clean: bool) -> None:
        """Its thread is over. `clean`: its agent is no more."""


class EngineThread(threading.Thread):
    """Calls an engine, which may keep it for as long as a peer stands still. No end of the process waits for it."""

    def __init__(self, name: str, work: Callable[..., object], *given: object) -> None:
        super().__init__(target=work, name=name, args=given, daemon=True)
        self.start()


def inside_engines() -> list[EngineThread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, EngineThread)]


def _pause(since: float) -> float:
    return min(_POLL_MOST, max(_POLL_FIRST, (time.monotonic() - since) * _POLL_SHARE))


class Courier:
    """One agent of the poster, joined to one of the lender's, and the thread that owns it."""

    def __init__(self, engine: Engine, arena: Arena, told: Told, owner: CourierOwner, joined: Joined) -> None:
        self._engine, self._arena, self._told, self._owner, self._joined = engine, arena, told, owner, joined
        self.generation = joined.generation
        # not a SimpleQueue: in Python up to 3.12 a `get` whose time is up before it has begun to wait waits for ever
        self._inbox: queue.Queue[Batch | None] = queue.Queue()
        self._under_way: deque[tuple[Batch, object]] = deque()
        self._state: Literal["good", "failed", "broken"] = "good"
        self._window: Window | None = None
        self._agent: Posting | None = None
        self.abandoned = False  # what is under way is not waited for
        self.oldest_read = NEVER  # generation; kept by the poster, as long as something that was read is not over
        self.read_lost = False  # by the poster: of something that was read it is not known how it ended
        self.diverted = False
        self._thread = EngineThread("quiesce-courier", self._run)

    # ------------------------------------------------------------ from the transport's thread

    def post(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def end(self) -> None:
        """No more batches; the agent ends when those under way have."""
        self._inbox.put(None)

    def divert(self) -> None:
        """What it still reads lands nowhere, from now on."""
        self.diverted = True
        if self._window is not None:
            self._window.divert()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ the courier's own thread

    def _run(self) -> None:
        clean = False
        try:
            if self._join():
                self._work()
            clean = self._end()
        except Exception as error:
            log.exception("a courier of %s ends by a fault", self._engine.caps.label)
            self._tell(self._owner.broken, str(error))
        self._told.tell(lambda: self._owner.courier_ended(self, clean))

    def _tell(self, what: Callable[..., None], *values: object) -> None:
        self._told.tell(lambda: what(self, *values))

    def _join(self) -> bool:
        try:
            self._window = Window(self._arena)
            self._agent = self._engine.join(self._window, self._joined.far)
            self._window.own()[:TRIAL_BYTES] = np.frombuffer(self._joined.trial, np.uint8)
            if not self._tiny_write():
                return False
        except Exception as error:
            self._tell(self._owner.broken, f"its agent cannot be reached: {error}")
            return False
        self._tell(self._owner.joined)
        return True

    def _tiny_write(self) -> bool:
        """The first shows that bytes arrive; a later one that all before it did. False: abandoned meanwhile."""
        assert self._agent is not None
        handle = self._agent.touch()
        began = time.monotonic()
        while not self._agent.over(handle):
            time.sleep(_pause(began))
            if self.abandoned:
                return False
        return True

    def _work(self) -> None:
        ending, moved = False, 0.0  # when something ended, or began with nothing else under way
        while not (ending and not self._under_way) and not self.abandoned:
            if ending:
                time.sleep(_pause(moved))
                if not self._engine.limits.ends_alone and time.monotonic() - moved > GIVE_UP_SECONDS:
                    self._give_up()
            else:
                with contextlib.suppress(queue.Empty):
                    alone = not self._under_way
                    batch = self._inbox.get(timeout=None if alone else _pause(moved))
                    if batch is None:
                        ending, moved = True, time.monotonic()
                    else:
                        moved = time.monotonic() if alone else moved
                        self._start(batch)
            if self._look():
                moved = time.monotonic()
            if self._state == "failed" and not self._under_way:
                self._recover()

    def _give_up(self) -> None:
        """The attachment is over, and this engine never tells what became of the first: it ends with our own agent.
        Of those behind it that may be known."""
        error = TimeoutError(f"nothing was heard of it for {GIVE_UP_SECONDS:g} s after its attachment had ended")
        while self._under_way:
            batch, handle = self._under_way.popleft()
            if not self._is_over(batch, handle):
                self._lost(batch, error)

    def _start(self, batch: Batch) -> None:
        if self._state != "good":
            self._tell(self._owner.lost, batch, False, "an earlier one on its courier was lost")
            return
        assert self._agent is not None
        try:
            self._under_way.append((batch, self._agent.post(batch.direction, batch.own, batch.theirs)))
        except Exception as error:
            self._lost(batch, error)

    def _look(self) -> bool:
        """In the order in which they were posted. True: something ended."""
        moved = False
        while self._under_way and self._is_over(*self._under_way[0]):
            self._under_way.popleft()
            moved = True
        return moved

    def _is_over(self, batch: Batch, handle: object) -> bool:
        """If so, it was told how."""
        assert self._agent is not None
        try:
            if not self._agent.over(handle):
                return False
            self._tell(self._owner.placed, batch)
        except Exception as error:
            self._lost(batch, error)
        return True

    def _lost(self, batch: Batch, error: Exception) -> None:
        self._state = "failed"
        self._tell(self._owner.lost, batch, True, f"{type(error).__name__}: {error}")

    def _recover(self) -> None:
        """One more tiny write on the same pair of agents: if it arrives, so has all that was lost before it."""
        reason = f"{self._engine.caps.label} has no proof that what was lost has landed"
        if self._engine.limits.flush:
            try:
                if self._tiny_write():
                    self._state = "good"
                    self._tell(self._owner.flushed)
                    return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        self._state = "broken"
        self._tell(self._owner.broken, reason)

    def _end(self) -> bool:
        """True: nothing of this agent moves any more."""
        if self._under_way:
            never_collected(self)  # leaving the process with it
            return False
        if self._agent is not None:
            try:
                self._agent.end()
            except Exception as error:
                log.error("an agent of %s does not end: %s", self._engine.caps.label, error)
                return False
        if self._window is not None:
            self._window.retire()
        return True


def never_collected(thing: object) -> None:
    """An agent with something under way must not be ended by the interpreter's last sweep either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Keeper:
    """One thread that makes and ends the lent agents, in the order asked; where an end takes long, it goes on beside.

    In the transport's thread it calls `made(generation, window, description, "")`, or with None and a reason, and
    `ended(generation, clean)`; `clean`: the agent is no more."""

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        told: Told,
        made: Callable[[int, Window | None, bytes, str], None],
        ended: Callable[[int, bool], None],
    ) -> None:
        self._engine, self._arena, self._told, self._made, self._ended = engine, arena, told, made, ended
        self._inbox: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._kept: dict[int, tuple[Lending, Window]] = {}
        self._ends: set[EngineThread] = set()  # that go on beside
        self._thread = EngineThread("quiesce-keeper", self._run)

    def make(self, generation: int) -> None:
        self._inbox.put(("make", generation))

    def end(self, generation: int) -> None:
        self._inbox.put(("end", generation))

    def leave_be(self, generation: int) -> None:
        """That agent cannot be ended safely: it stays as long as the process."""
        self._inbox.put(("leave be", generation))

    def leave(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._inbox.put(("leave", 0))
        self._thread.join(seconds)
        for end in list(self._ends):
            end.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            what, generation = self._inbox.get()
            if what == "leave":
                for left in list(self._kept):
                    self._beside(self._close, left)
                return
            if what == "make":
                self._open(generation)
            elif what == "leave be":
                never_collected(self._kept.pop(generation, None))
            else:
                self._beside(self._end, generation)

    def _beside(self, work: Callable[[int], object], generation: int) -> None:
        if not self._engine.limits.ends_slowly:
            work(generation)
            return
        self._ends = {end for end in self._ends if end.is_alive()}
        self._ends.add(EngineThread("quiesce-keeper-end", work, generation))

    def _end(self, generation: int) -> None:
        clean = self._close(generation)
        self._told.tell(partial(self._ended, generation, clean))

    def _open(self, generation: int) -> None:
        window = None
        try:
            window = Window(self._arena)
            lending = self._engine.lend(window)
            self._kept[generation] = lending, window
            self._told.tell(partial(self._made, generation, window, lending.describe(), ""))
        except Exception as error:
            log.error("no agent of %s for a peer: %s", self._engine.caps.label, error)
            self._told.tell(partial(self._made, generation, None, b"", str(error)))

    def _close(self, generation: int) -> bool:
        kept = self._kept.pop(generation, None)
        if kept is None:
            return True
        lending, window = kept
        try:
            lending.end()
        except Exception as error:
            log.error("the agent lent under generation %d does not end: %s", generation, error)
            never_collected(lending)
            return False
        window.retire()
        return True
