"""The thread that owns an agent comes back from its waiting, however late it was."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from quiesce.transfer import couriers
from quiesce.transfer.agent import TRIAL_BYTES, Far
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.mooncake import MooncakeEngine

STALLED = """
import signal, time
import numpy as np
from quiesce.transfer import couriers
from quiesce.transfer.agent import Far
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.mooncake import MooncakeEngine

couriers._POLL_FIRST = couriers._POLL_MOST = WAIT = 0.5
couriers.EngineThread = lambda *_: None  # the main thread is its own here: signals interrupt nobody else


class Agent:
    asked = 0

    def post(self, *_):
        return "a handle"

    def over(self, handle):
        self.asked += 1
        if self.asked == 1:  # the wait that follows is interrupted, for longer than it was to last
            signal.signal(signal.SIGALRM, lambda *_: time.sleep(WAIT + 0.2))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return False
        courier.end()
        return True


told = couriers.Told()
joined = couriers.Joined(Far(b"", 0, 0, 1, 4096), b"", 1)
courier = couriers.Courier(MooncakeEngine("rdma"), shared_arena(1, 4096), told, couriers.CourierOwner(), joined)
courier._agent = Agent()
courier.post(couriers.Batch("write", np.zeros(1, np.int64), np.zeros(1, np.int64)))
courier._work()
print("it came back")
"""


def test_a_courier_that_stood_still_for_longer_than_it_meant_to_wait_looks_again() -> None:
    """As a thread that gets no processor for a while. It was seen to wait for ever: a post without an outcome."""
    ended = subprocess.run([sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "it came back\n", ended.stderr


class Agent:
    """The first page that is posted is never heard of again; page 1 has landed."""

    def __init__(self) -> None:
        self.ended = 0

    def post(self, direction: str, own: np.ndarray, theirs: np.ndarray) -> object:
        return int(own[0])

    def touch(self) -> object:
        return "the trial"

    def over(self, handle: object) -> bool:
        return handle != 0

    def end(self) -> None:
        self.ended += 1


class Heard(couriers.CourierOwner):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def placed(self, courier: couriers.Courier, batch: couriers.Batch) -> None:
        self.said.append(("placed", int(batch.own[0])))

    def lost(self, courier: couriers.Courier, batch: couriers.Batch, started: bool, reason: str) -> None:
        self.said.append(("lost", int(batch.own[0]), started))

    def courier_ended(self, courier: couriers.Courier, clean: bool) -> None:
        self.said.append(("ended", clean))


def test_one_that_is_never_heard_of_does_not_hide_what_became_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over verbs a completion can be lost: after the end of the attachment it is UNKNOWN, and our agent is ended."""
    monkeypatch.setattr(couriers, "GIVE_UP_SECONDS", 0.05)
    agent, told, heard = Agent(), couriers.Told(), Heard()
    monkeypatch.setattr(MooncakeEngine, "join", lambda *_: agent)
    joined = couriers.Joined(Far(b"", 0, 0, 2, 4096), bytes(TRIAL_BYTES), 1)
    courier = couriers.Courier(MooncakeEngine("rdma"), shared_arena(2, 4096), told, heard, joined)
    for page in (0, 1):
        courier.post(couriers.Batch("write", np.array([page]), np.array([page])))
    courier.end()
    assert courier.wait(60.0)
    told.turn()
    assert heard.said == [("lost", 0, True), ("placed", 1), ("ended", True)] and agent.ended == 1
