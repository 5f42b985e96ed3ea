"""Which engines there are: those built in, and those that others bring as entry points of `quiesce.transports`.

An entry point names a function `make(setup: Setup) -> Transport`. It raises MissingEngine, in one line that says what
to install, and ValueError for settings that cannot work. A name may carry a lane: `nixl/cma`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quiesce.transfer.agent import MissingEngine
from quiesce.transfer.interface import Transport

if TYPE_CHECKING:
    from quiesce.transfer.tcp_tls import Tls

__all__ = ["AUTO", "GROUP", "MissingEngine", "Setup", "make", "names", "rdma_devices"]

GROUP = "quiesce.transports"
AUTO = "auto"
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is told. `host`: own address that peers on other hosts reach, None: this host only. `patience`:
    seconds in which something that has work must move. `direction`: what it is used for; "both" is for tests of
    engines."""

    run_dir: Path
    epoch: int
    lane: str = ""
    host: str | None = None
    max_transfer_pages: int = 1024
    patience: float = 30.0
    direction: Literal["push", "pull", "both"] = "push"
    tls: Tls | None = None

    @property
    def address(self) -> str:
        return self.host or "127.0.0.1"


Make = Callable[[Setup], Transport]

# So that they work from a source tree as well; pyproject.toml names the same ones.
BUILT_IN = {name: f"quiesce.transfer.engines:{name}" for name in ("shm", "tcp", "nixl", "mooncake", "mori", "null")}


def _found() -> dict[str, str]:
    plugged = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {**plugged, **BUILT_IN}


def names() -> list[str]:
    return sorted(_found())


def load(name: str) -> Make:
    """Raises ValueError for a name that nobody has."""
    value = _found().get(name)
    if value is None:
        raise ValueError(f"there is no transfer engine {name!r}; there are {', '.join(names())}")
    module, _, function = value.partition(":")
    try:
        made: Make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise MissingEngine(f"the transfer engine {name} ({value}) cannot be loaded: {error}") from error
    return made


def make(label: str, setup: Setup) -> Transport:
    """`label`: a name, or name/lane. Raises ValueError, MissingEngine, OSError."""
    name, _, lane = label.partition("/")
    return load(name)(Setup(**{**vars(setup), "lane": lane}))


def rdma_devices() -> list[str]:
    return sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []


def candidates() -> list[str]:
    """For `auto`, best first. Over plain networks that is our own tcp: it is ahead of the others there, and it alone
    has an exact fence."""
    rdma = ["nixl/rc", "mooncake/rdma", "mori"] if rdma_devices() else []
    return ["shm", *rdma, "tcp"]
