"""The thread that owns an agent comes back from its waiting, however late it was."""

from __future__ import annotations

import subprocess
import sys

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
