"""What the lending side remembers: connections, and for each peer epoch all that it was ever lent."""

from __future__ import annotations

from dataclasses import dataclass, field

from quiesce.transfer import attach as wire
from quiesce.transfer.window import Window


@dataclass(eq=False)
class Connection:
    line: wire.Line
    deadline: float | None
    pid: int  # 0: cannot be known
    own_challenge: bytes
    their_challenge: bytes = b""
    epoch: int = 0
    generation: int = 0  # set once an agent was asked for
    window: Window | None = None
    trial: bytes = b""
    attached: bool = False
    read: bool = False  # pages were lent to it for reading


@dataclass(eq=False)
class PeerRecord:
    """All that was ever lent to one peer epoch."""

    epoch: int
    first: int = 0
    generation: int = 0  # the newest
    unproven: set[int] = field(default_factory=set)  # generations under which something may still land
    connection: Connection | None = None  # of the newest
    pid: int = 0
    pidfd: int | None = None
    asked: int = 0  # fence without a number: the generation it was first asked for
    death: bool = False  # what it is proven by: the end of its process
    read: bool = False  # it only ever reads, and who is dead reads no more

    @property
    def proven_through(self) -> int:
        return min(self.unproven) - 1 if self.unproven else self.generation
