"""The cells of the crash matrix, and where engines differ in what a cell can be and must show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quiesce.lab.cluster import Cluster
from quiesce.lab.patient import DECODE, PREFILL

Direction = Literal["push", "pull"]

VICTIMS = ("prefill", "decode", "mover", "router")
ACTIONS = ("kill", "stop short", "stop long", "restart")
STATES = ("queued", "mid-transfer", "landed", "decoding")


@dataclass(frozen=True)
class Cell:
    victim: str
    action: str
    state: str

    def __str__(self) -> str:
        return f"{self.victim} {self.action} {self.state}".replace(" ", "-")


CELLS = [Cell(victim, action, state) for state in STATES for action in ACTIONS for victim in VICTIMS]


@dataclass(frozen=True)
class Lane:
    """What the cells need to know of the engine that moves the pages."""

    transfer: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.transfer}-{self.direction}"

    @property
    def cells(self) -> list[Cell]:
        """Only shm has a process of its own that copies."""
        return [cell for cell in CELLS if cell.victim != "mover" or self.transfer == "shm"]

    @property
    def poster(self) -> str:
        """The one that moves the bytes, and has the mover where there is one."""
        return PREFILL if self.direction == "push" else DECODE

    @property
    def lands_by_itself(self) -> bool:
        """Bytes get into the pages of a process that stands still."""
        return self.transfer in ("shm", "nixl/cma")

    @property
    def gated(self) -> bool:
        """The last word about pages that are all there is held back by a gate, not by stopping who should hear it."""
        return self.direction == "pull" or not self.lands_by_itself

    def allowed(self, boot: dict[str, Any]) -> dict[str, Any] | None:
        """What threads and descriptors are compared with; None: with nothing, because each reader that goes away on
        NIXL leaves an agent behind (64 at most). Mooncake opens connections of its own as more batches are under way
        at a time, and keeps them; that their number does not go on growing is the conformance suite's."""
        if self.direction == "pull" and self.transfer.startswith("nixl"):
            return None
        return {**boot, "fds": boot["fds"] + (8 if self.transfer.startswith("mooncake") else 0)}

    def settles_without(self, victim: str) -> bool:
        """Whether the other side gets all its pages back while this one stands still."""
        if self.direction == "push":
            return self.transfer != "nixl/cma" if victim == "prefill" else self.lands_by_itself
        return victim == "prefill" or not self.transfer.startswith("nixl")


def lane_of(cluster: Cluster) -> Lane:
    return Lane(cluster.common.get("transfer", "shm"), cluster.common.get("direction", "push"))
