"""NIXL over UCX, one lane at a time: `tcp`, `cma` (one machine, the writer copies) or `rc` (RDMA verbs).

A transfer in progress cannot be called back: releasing its handle forgets it and its bytes go on landing, so a handle
is polled to its end, whatever happens. Only `DONE` means anything. An exception says nothing about what still lands;
one more tiny write between the same two agents, awaited, shows that all before it has.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from quiesce.transfer.agent import TRIAL_BYTES, Direction, Far, Limits, MissingEngine, claims
from quiesce.transfer.agents import AgentTransport
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena, Capabilities
from quiesce.transfer.window import SCRATCH, Window

Lane = Literal["tcp", "cma", "rc"]

# What UCX may use, and nothing else. Messages and keep-alives go by tcp where the lane itself has none.
_TLS: dict[str, str] = {"tcp": "tcp", "cma": "cma,tcp", "rc": "rc_v"}
MEASURED = ("tcp", "cma")  # lanes on which the whole suite has passed
MISSING = "NIXL is not installed: pip install 'quiesce[nixl]'"


def capabilities(lane: Lane, trusted: bool) -> Capabilities:
    """`trusted`: this lane was measured by the conformance suite, on NIXL 1.5.1. Else nothing that proves is
    claimed."""
    fence = trusted and lane != "cma"  # the writer's kernel copies by itself: no agent's end stops it
    return claims(
        "nixl",
        lane,
        drain="flush" if trusted else "none",
        fence="peer" if fence else "none",
        fences_readers=False,
        measured=trusted,
    )


class _Agent(msgspec.Struct, frozen=True):
    metadata: bytes


@dataclass(frozen=True)
class NixlEngine:
    """`devices`: UCX's names of the network devices to use; empty: all. `on_trial`: claims what a lane would have to
    prove before that was measured; for the suite that measures it, and for nobody else."""

    lane: Lane = "tcp"
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
        cma = self.lane == "cma"
        return Limits(
            ending=self._trusted and not cma,
            ending_read=False,  # UCX 1.23 crashes when an agent ends that still answers reads
            death=cma,
            diverts=self.lane != "rc",
            flush=self._trusted,
            pages_in_flight=4096,
            batches_in_flight=2,
        )

    def check(self) -> None:
        if self.lane not in _TLS:
            raise ValueError(f"NIXL has no lane {self.lane!r} here: {', '.join(_TLS)}")
        self._pin()
        _library()

    def timeouts(self) -> list[str]:
        """NIXL has none; UCX's own, for peers that are gone, raise and end nothing that we take for ended."""
        return []

    def _pin(self) -> None:
        """UCX reads its settings from the environment, anew for each agent."""
        os.environ["UCX_TLS"] = _TLS[self.lane]
        # Two copies of libnl in a process crash it when it exits: NIXL's modules for verbs bring one, the module for
        # EFA, which has no rc, brings the system's through libefa.
        os.environ["UCX_MODULES"] = "^efa" if self.lane == "rc" else "^ib"
        os.environ.pop("UCX_NET_DEVICES", None)
        if self.devices:
            os.environ["UCX_NET_DEVICES"] = self.devices

    def _agent(self, window: Window, posts: bool) -> tuple[Any, Any]:
        """NIXL's own thread never sleeps and takes most of a core. Who posts over cma has no need of it: the kernel
        copies inside the call that posts, and asking for the state does what else there is to do. Over tcp it is
        faster without, but then, once in tens of thousands, a transfer stays under way for ever however often it is
        asked for, with the answer unread in its socket (NIXL 1.5.1)."""
        self._pin()
        api = _library()
        config = api.nixl_agent_config(
            enable_prog_thread=not (posts and self.lane == "cma"),
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = api.nixl_agent(f"quiesce-{secrets.token_hex(8)}", config)
        agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        spans = [[window.base, window.size, 0], [window.scratch, SCRATCH, 0]]
        registered = agent.register_memory(np.array(spans, np.uint64), "DRAM", backends=["UCX"])
        return agent, registered

    def lend(self, window: Window) -> LentAgent:
        return LentAgent(*self._agent(window, posts=False))

    def join(self, window: Window, far: Far) -> JoinedAgent:
        try:
            found = msgspec.msgpack.decode(far.agent, type=_Agent)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not an agent of NIXL: {error}") from error
        return JoinedAgent(*self._agent(window, posts=True), window, far, found.metadata)


def _library() -> Any:
    # What it says goes to stdout, which belongs to the program.
    for name, value in (("NIXL_LOG_LEVEL", "WARN"), ("UCX_LOG_FILE", "stderr"), ("UCX_LOG_LEVEL", "error")):
        os.environ.setdefault(name, value)
    try:
        from nixl_cu12 import _api  # noqa: PLC0415
    except ImportError as error:
        raise MissingEngine(f"{MISSING} ({error})") from error
    return _api


class LentAgent:
    def __init__(self, agent: Any, registered: Any) -> None:
        self._agent, self._registered = agent, registered

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(_Agent(self._agent.get_agent_metadata()))

    def end(self) -> None:
        """The agent goes first and takes its registrations along: deregistering with something in flight is a use
        after free inside UCX, and no fence."""
        _delete(self)


class JoinedAgent:
    """NIXL is told of both pools once, page by page and the scratch bytes last; a batch is numbers in these lists."""

    def __init__(self, agent: Any, registered: Any, window: Window, far: Far, metadata: bytes) -> None:
        self._agent, self._registered = agent, registered
        remote = agent.add_remote_agent(metadata)
        own = _listed(window.base, window.page_bytes, window.pages, window.scratch)
        self._own = agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, "DRAM")
        theirs = _listed(far.base, far.page_bytes, far.pages, far.scratch)
        self._theirs = agent.prep_xfer_dlist(remote, theirs, "DRAM")
        self._scratch = np.array([window.pages]), np.array([far.pages])

    def post(self, direction: Direction, own: np.ndarray, theirs: np.ndarray) -> Any:
        near, far = own.astype(np.int32), theirs.astype(np.int32)
        handle = self._agent.make_prepped_xfer(direction.upper(), self._own, near, self._theirs, far)
        self._agent.transfer(handle)  # DONE, PROC, or it raises; `over` asks in any case
        return handle

    def touch(self) -> Any:
        return self.post("write", *self._scratch)

    def over(self, batch: Any) -> bool:
        state = self._agent.check_xfer_state(batch)
        if state == "PROC":
            return False
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        self._agent.release_xfer_handle(batch)
        return True

    def end(self) -> None:
        self._own.release()
        self._theirs.release()
        self._own = self._theirs = None  # they refer to the agent
        _delete(self)


def _listed(base: int, page_bytes: int, pages: int, scratch: int) -> np.ndarray:
    """NIXL's short form: address, length, device, distance, count."""
    rows = [[base, page_bytes, 0, page_bytes, pages], [scratch, TRIAL_BYTES, 0, TRIAL_BYTES, 1]]
    return np.array(rows, np.uint64)


def _delete(holder: LentAgent | JoinedAgent) -> None:
    """Ends the agent now, on this thread. Raises if somebody else still holds it, for then it lives on."""
    agent = holder._agent
    inner = agent.agent
    holder._registered = holder._agent = None
    del agent.agent, agent
    if sys.getrefcount(inner) > 2:  # this name, and the call that asks
        raise RuntimeError("the agent is still referred to")


def _factory(engine: NixlEngine) -> Any:
    def make(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
        return AgentTransport(engine, run_dir, epoch, max_transfer_pages=100), shared_arena(pages, page_bytes)

    return make


# For the conformance suite: `quiesce.transfer.nixl:tcp`, on the loopback device.
tcp = _factory(NixlEngine("tcp", devices="lo"))
cma = _factory(NixlEngine("cma", devices="lo"))
