"""MORI-IO over RDMA, for AMD GPUs. Written against the Python of amd-mori 1.0 to 1.2.4; NOT RUN on a device.

What could not be run: anything that moves bytes. The library needs ROCm 7 and an RDMA device, and ends the whole
process where either is missing, so this adapter looks for both before it loads it. Its tests run against a stand-in
with the same signatures. Therefore nothing is claimed: a post that fails is UNKNOWN, nothing drains, nothing fences,
and a worker serves over it only with --allow-unproven. Read in its source: a failed status is not terminal unless a
transfer has one queue pair, there is no way to cancel, and the engine writes into a TransferStatus for as long as its
operation lives, so that none is ever dropped before it has ended.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quiesce.transfer.agent import TRIAL_BYTES, Direction, Far, Limits, MissingEngine, claims
from quiesce.transfer.interface import Capabilities
from quiesce.transfer.window import Window

MISSING = "MORI is not installed: pip install amd-mori, where ROCm is"
ROCM = Path("/dev/kfd")  # exists where the kernel drives an AMD GPU
VERBS = Path("/sys/class/infiniband")
CPU_DEVICE = -1

CAPABILITIES = claims("mori", "rdma", placed_means="accepted", fences_readers=False, measured=False)


class _Agent(msgspec.Struct, frozen=True):
    engine: bytes  # EngineDesc.pack()
    memory: bytes  # MemoryDesc.pack()
    base: int  # the address that its offsets count from


@dataclass(frozen=True)
class MoriEngine:
    """`host`: own address, at which peers reach the engines."""

    host: str = "127.0.0.1"

    @property
    def caps(self) -> Capabilities:
        return CAPABILITIES

    @property
    def limits(self) -> Limits:
        return Limits(
            ending=False,
            ending_read=False,
            death=False,
            diverts=False,
            flush=False,
            pages_in_flight=1024,
            batches_in_flight=4,
        )

    def check(self) -> None:
        """Without these the library calls exit() or aborts, which no caller survives."""
        if not ROCM.exists():
            raise MissingEngine(f"MORI needs an AMD GPU with ROCm, and there is no {ROCM}")
        if not VERBS.is_dir() or not any(VERBS.iterdir()):
            raise MissingEngine(f"MORI needs an RDMA device, and there is none in {VERBS}")
        _library()

    def timeouts(self) -> list[str]:
        """It has none that is set here; nothing of it is taken for the end of anything."""
        return []

    def _engine(self, window: Window) -> tuple[Any, Any]:
        io = _library()
        engine = io.IOEngine(f"quiesce-{secrets.token_hex(8)}", io.IOEngineConfig(host=self.host, port=0))
        config = io.RdmaBackendConfig(
            qp_per_transfer=1, post_batch_size=-1, num_worker_threads=1, enable_notification=False
        )
        engine.create_backend(io.BackendType.RDMA, config)
        memory = engine.register_memory(window.base, window.room, CPU_DEVICE, io.MemoryLocationType.CPU)
        return engine, memory

    def lend(self, window: Window) -> LentEngine:
        return LentEngine(*self._engine(window), window.base)

    def join(self, window: Window, far: Far) -> JoinedEngine:
        io = _library()
        try:
            found = msgspec.msgpack.decode(far.agent, type=_Agent)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not an engine of MORI: {error}") from error
        engine, memory = self._engine(window)
        engine.register_remote_engine(io.EngineDesc.unpack(found.engine))
        session = engine.create_session(memory, io.MemoryDesc.unpack(found.memory))
        if session is None:
            raise RuntimeError("MORI makes no session with the peer's memory")
        return JoinedEngine(engine, memory, session, window, far, found.base)


def _library() -> Any:
    try:
        from mori import io  # noqa: PLC0415
    except (ImportError, OSError) as error:
        raise MissingEngine(f"{MISSING} ({error})") from error
    return io


class LentEngine:
    def __init__(self, engine: Any, memory: Any, base: int) -> None:
        self._engine, self._memory, self._base = engine, memory, base

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(_Agent(self._engine.get_engine_desc().pack(), self._memory.pack(), self._base))

    def end(self) -> None:
        """Keys and queue pairs go with the engine. What that proves was not measured: nothing is claimed for it."""
        self._engine.deregister_memory(self._memory)
        self._engine = None


class JoinedEngine:
    def __init__(self, engine: Any, memory: Any, session: Any, window: Window, far: Far, base: int) -> None:
        self._engine, self._memory, self._session = engine, memory, session
        self._page_bytes, self._pages_at = far.page_bytes, far.base - base  # of page 0 in the memory of the peer
        self._scratch = window.scratch - window.base, far.scratch - base
        self._failed: list[Any] = []  # statuses that the engine may still write into

    def post(self, direction: Direction, own: np.ndarray, theirs: np.ndarray) -> Any:
        near, far = own * self._page_bytes, theirs * self._page_bytes + self._pages_at
        return self._move(direction, near.tolist(), far.tolist(), self._page_bytes)

    def touch(self) -> Any:
        return self._move("write", [self._scratch[0]], [self._scratch[1]], TRIAL_BYTES)

    def _move(self, direction: Direction, near: list[int], far: list[int], size: int) -> Any:
        move = self._session.batch_write if direction == "write" else self._session.batch_read
        return move(near, far, [size] * len(near), self._session.allocate_transfer_uid())

    def over(self, batch: Any) -> bool:
        if batch.Succeeded():
            return True
        if batch.Failed():
            self._failed.append(batch)
            raise RuntimeError(f"MORI failed: {batch.Code()}: {batch.Message()}")
        return False

    def end(self) -> None:
        if self._failed:
            raise RuntimeError("some of its transfers have failed, and what they still do is not known")
        self._session = None
        self._engine.deregister_memory(self._memory)
        self._engine = None
