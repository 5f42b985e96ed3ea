"""Bare loops on NIXL and Mooncake: one agent at either end with the settings of the layer's, and the library's calls.

What the layer adds, and what these leave out: cutting posts into batches, a thread of its own for the agent, an agent
for each peer, attaching with secrets, generations, checks of pages, outcomes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np

from quiesce.transfer.arena import shared_arena
from quiesce.transfer.mooncake import MooncakeEngine
from quiesce.transfer.nixl import Lane, NixlEngine
from quiesce.transfer.window import Window

PAUSE = 0.0001  # seconds between looks at a transfer: looking all the time starves NIXL's own thread


class Far:
    """The receiving process: it holds an agent over its arena and says where, in hex, and page 0's address."""

    def __init__(self, label: str, pages: int, page_bytes: int, core: int) -> None:
        words = ["bare", label, str(pages), str(page_bytes), str(core)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_lender", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        agent, base = self._process.stdout.readline().split()
        self.agent, self.base = bytes.fromhex(agent), int(base)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def hold(agent: bytes, window: Window) -> None:
    print(agent.hex(), window.base, flush=True)
    sys.stdin.read()


def addresses(base: int, size: int, pages: list[int]) -> np.ndarray:
    return np.asarray(pages, np.uint64) * np.uint64(size) + np.uint64(base)


class Nixl:
    """Both pools prepared once; for each list `make_prepped_xfer`, `transfer`, and `check_xfer_state` till DONE."""

    def __init__(self, lane: Lane, pages: int, page_bytes: int, core: int) -> None:
        self._far = Far(f"nixl/{lane}", pages, page_bytes, core)
        arena = shared_arena(pages, page_bytes)
        arena.pages[:] = 1
        self._size, self._window = page_bytes, Window(arena)
        self._agent, self._registered = NixlEngine(lane, devices=loopback(lane))._agent(self._window, True)
        remote = self._agent.add_remote_agent(self._far.agent)
        self._own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._pool(self._window.base, pages), "DRAM")
        self._theirs = self._agent.prep_xfer_dlist(remote, self._pool(self._far.base, pages), "DRAM")

    def move(self, transfers: Any) -> None:
        agent, handles = self._agent, []
        for own, theirs in transfers:
            near, far = np.asarray(own, np.int32), np.asarray(theirs, np.int32)
            handles.append(agent.make_prepped_xfer("WRITE", self._own, near, self._theirs, far))
            agent.transfer(handles[-1])
        for handle in handles:
            while (state := agent.check_xfer_state(handle)) == "PROC":
                time.sleep(PAUSE)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)

    def _pool(self, base: int, pages: int) -> np.ndarray:
        """NIXL's short form: address, length, device, distance, count."""
        return np.array([[base, self._size, 0, self._size, pages]], np.uint64)

    def close(self) -> None:
        self._far.close()


def receive_nixl(lane: Lane, pages: int, page_bytes: int) -> None:
    window = Window(shared_arena(pages, page_bytes))
    agent, registered = NixlEngine(lane, devices=loopback(lane))._agent(window, False)
    hold(agent.get_agent_metadata(), window)
    del registered


def loopback(lane: Lane) -> str:
    return "" if lane == "rc" else "lo"


class Mooncake:
    """One `batch_transfer_sync_write` for each list."""

    def __init__(self, pages: int, page_bytes: int, core: int) -> None:
        self._far = Far("mooncake/tcp", pages, page_bytes, core)
        arena = shared_arena(pages, page_bytes)
        arena.pages[:] = 1
        self._size, self._window = page_bytes, Window(arena)
        self._engine = MooncakeEngine("tcp")._engine(self._window)

    def move(self, transfers: Any) -> None:
        peer = self._far.agent.decode()
        for own, theirs in transfers:
            near = addresses(self._window.base, self._size, own).tolist()
            far = addresses(self._far.base, self._size, theirs).tolist()
            code = self._engine.batch_transfer_sync_write(peer, near, far, [self._size] * len(near))
            assert code == 0, code

    def close(self) -> None:
        self._far.close()


def receive_mooncake(pages: int, page_bytes: int) -> None:
    window = Window(shared_arena(pages, page_bytes))
    engine = MooncakeEngine("tcp")._engine(window)
    hold(f"127.0.0.1:{engine.get_rpc_port()}".encode(), window)
