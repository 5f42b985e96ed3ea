"""Mooncake's TransferEngine, one lane at a time: `tcp`, or `rdma` (verbs).

Only return code 0 of a whole batch means anything: then all of it is in the peer's memory. After -1 there is neither
a handle nor a flush, and the engine was seen to write hundreds of MiB more. So batches are small, every address is
checked before it gets here, the engine's own timeouts are set so high that they do not fire, and what is lost stays
unproven until the peer's engine over there is no more.
"""

from __future__ import annotations

import ctypes
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from quiesce.transfer.agent import TRIAL_BYTES, Direction, Far, Limits, MissingEngine, claims
from quiesce.transfer.agents import AgentTransport
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena, Capabilities
from quiesce.transfer.window import SCRATCH, Window

log = logging.getLogger("quiesce.transfer")

Lane = Literal["tcp", "rdma"]

MEASURED = ("tcp",)  # lanes on which the whole suite has passed
MISSING = "Mooncake is not installed: pip install 'quiesce[mooncake]'"
_NO_BATCH = 2**64 - 1
NO_VERBS = "Mooncake needs libibverbs, which is not installed: apt-get install libibverbs1"

# Longer than any deadline of ours (a day at most): one that fires tells nothing, and its batch goes on landing.
_SECONDS = str(1_000_000)
_PINNED = {
    "MC_TRANSFER_TIMEOUT": _SECONDS,
    "MC_TCP_STATUS_TIMEOUT_SEC": _SECONDS,
    "MC_TCP_PROGRESS_TIMEOUT_SEC": _SECONDS,
    # The most that it takes, and beyond it one second. It runs only for what its queues have no room for: they have
    # more than is ever posted to one peer at a time.
    "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
_FORBIDDEN = ("MC_TCP_PROTO", "MC_FORCE_TCP", "MC_USE_TENT", "MC_SLICE_TIMEOUT")  # each changes what rc 0 means


def capabilities(lane: Lane, trusted: bool) -> Capabilities:
    """`trusted`: this lane was measured by the conformance suite, on Mooncake 0.3.13.post1. Else nothing that proves
    is claimed."""
    return claims(
        "mooncake",
        lane,
        drain="per_post" if trusted else "none",
        fence="peer" if trusted else "none",
        measured=trusted,
    )


class _Agent(msgspec.Struct, frozen=True):
    name: str  # host:port, fresh for each engine


@dataclass(frozen=True)
class MooncakeEngine:
    """`host`: own address, at which peers reach the engines. `devices`: RDMA devices, e.g. `mlx5_0`; empty: all.
    `on_trial`: claims what a lane would have to prove before that was measured; for the suite that measures it, and
    for nobody else."""

    lane: Lane = "tcp"
    host: str = "127.0.0.1"
    devices: str = ""
    on_trial: bool = False

    @property
    def _trusted(self) -> bool:
        return self.lane in MEASURED or self.on_trial

    @property
    def caps(self) -> Capabilities:
        return capabilities(self.lane, self._trusted)

    @property
    def limits(self) -> Limits:
        return Limits(
            ending=self._trusted,
            ending_read=self._trusted,
            death=False,
            diverts=self.lane == "tcp",
            flush=False,
            pages_in_flight=512,
            batches_in_flight=2,
            ends_slowly=True,
            ends_alone=self.lane == "tcp",  # over verbs nothing is ever heard of a write to an engine that is no more
        )

    def check(self) -> None:
        if self.lane not in ("tcp", "rdma"):
            raise ValueError(f"Mooncake has no lane {self.lane!r} here: tcp, rdma")
        for name in _FORBIDDEN:
            if os.environ.get(name):
                raise ValueError(f"{name} is set: it changes what Mooncake's success means. Unset it")
        self._pin()
        _library()

    def timeouts(self) -> list[str]:
        """What an engine of this process would read now."""
        low = [name for name, value in _PINNED.items() if os.environ.get(name) != value]
        return [f"{name} is {os.environ.get(name)} and must be {_PINNED[name]}" for name in low]

    def _pin(self) -> None:
        """Read by the engine each time that it makes one, so it must be right each time."""
        os.environ.update(_PINNED)
        if self.lane == "tcp":
            os.environ["MC_TCP_BIND_ADDRESS"] = self.host

    def _engine(self, window: Window) -> Any:
        self._pin()
        engine = _library()()
        if engine.initialize(self.host, "P2PHANDSHAKE", self.lane, self.devices):
            raise RuntimeError(f"Mooncake cannot start an engine over {self.lane} at {self.host} ({self.devices})")
        for address, size in ((window.base, window.size), (window.scratch, SCRATCH)):
            if engine.register_memory(address, size):
                raise RuntimeError(f"Mooncake cannot register {size} bytes")
        return engine

    def lend(self, window: Window) -> LentEngine:
        return LentEngine(self._engine(window), self.host)

    def join(self, window: Window, far: Far) -> JoinedEngine | JoinedVerbs:
        try:
            found = msgspec.msgpack.decode(far.agent, type=_Agent)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not an engine of Mooncake: {error}") from error
        joined = JoinedEngine if self.lane == "tcp" else JoinedVerbs
        return joined(self._engine(window), found.name, window, far)


def _library() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    except ImportError as error:
        if "libibverbs" in str(error):
            raise MissingEngine(f"{NO_VERBS} ({error})") from error
        raise MissingEngine(f"{MISSING} ({error})") from error
    return TransferEngine


def _end(engine: Any) -> None:
    """Its threads and sockets have ended when this returns and the caller has let go of it.

    The destructor waits a second for a thread of its own (over verbs ten) and holds the interpreter meanwhile:
    nothing else in the worker would run. So what it calls is called before it, without the interpreter."""
    free = _free()
    if free is not None:
        free(engine.get_engine_ptr())


@cache
def _free() -> Callable[[int], int] | None:
    from mooncake import engine  # noqa: PLC0415

    try:
        call = ctypes.CDLL(engine.__file__)._ZN8mooncake14TransferEngine10freeEngineEv
        assert callable(engine.TransferEngine.get_engine_ptr)
    except (OSError, AttributeError) as error:
        log.warning("when a peer detaches, this Mooncake stops the whole worker for a second: %s", error)
        return None
    call.restype, call.argtypes = ctypes.c_int, (ctypes.c_void_p,)
    return call


class LentEngine:
    def __init__(self, engine: Any, host: str) -> None:
        self._engine = engine
        self._name = f"{host}:{engine.get_rpc_port()}"

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(_Agent(self._name))

    def end(self) -> None:
        engine, self._engine = self._engine, None
        _end(engine)


class _Joined(ABC):
    def __init__(self, engine: Any, peer: str, window: Window, far: Far) -> None:
        self._engine, self._peer, self._window, self._far = engine, peer, window, far

    def post(self, direction: Direction, own: np.ndarray, theirs: np.ndarray) -> object:
        near, far = self._window.addresses(own).tolist(), self._far.addresses(theirs).tolist()
        return self._move(direction, near, far, self._far.page_bytes)

    def touch(self) -> object:
        return self._move("write", [self._window.scratch], [self._far.scratch], TRIAL_BYTES)

    @abstractmethod
    def _move(self, direction: Direction, near: list[int], far: list[int], size: int) -> object: ...

    def end(self) -> None:
        engine, self._engine = self._engine, None
        _end(engine)


class JoinedEngine(_Joined):
    def _move(self, direction: Direction, near: list[int], far: list[int], size: int) -> object:
        """Blocks until the batch is over, with the interpreter free."""
        move = self._engine.batch_transfer_sync_write
        if direction == "read":
            move = self._engine.batch_transfer_sync_read
        code = move(self._peer, near, far, [size] * len(near))
        if code != 0:
            raise RuntimeError(f"Mooncake returned {code}")
        return None

    def over(self, batch: object) -> bool:
        return True


class JoinedVerbs(_Joined):
    """Page by page and without waiting: a call that waited for a peer that is gone would never return, and an engine
    that is inside a call cannot be ended. The status of one page is exact; that of several is that of the first. With
    the engine's end go its queue pairs, and with them what was under way."""

    def _move(self, direction: Direction, near: list[int], far: list[int], size: int) -> object:
        start = self._engine.batch_transfer_async_write
        if direction == "read":
            start = self._engine.batch_transfer_async_read
        pages: deque[int] = deque()
        for own, theirs in zip(near, far, strict=True):
            page = start(self._peer, [own], [theirs], [size])
            if page in (0, _NO_BATCH):
                raise RuntimeError("Mooncake did not take a page")
            pages.append(page)
        return pages

    def over(self, batch: Any) -> bool:
        while batch:
            code = self._engine.transfer_check_status(batch[0])
            if code == 0:
                return False
            if code != 1:
                raise RuntimeError(f"Mooncake says {code} of a page")
            batch.popleft()
        return True


def _factory(engine: MooncakeEngine) -> Any:
    def make(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
        return AgentTransport(engine, run_dir, epoch, max_transfer_pages=100), shared_arena(pages, page_bytes)

    return make


tcp = _factory(MooncakeEngine("tcp"))  # for the conformance suite: `quiesce.transfer.mooncake:tcp`
