"""What is lent over tcp, to whom: the grants in force, and the shutting of their gates."""

from __future__ import annotations

from collections.abc import Sequence

from quiesce.transfer.interface import Access
from quiesce.transfer.tcp_stream import Gate


class Permits:
    """Changed by the owner's thread, looked up by the threads of the lanes. Generations count up for each grant of a
    write, so that a generation names one grant; those of reads are the core's."""

    def __init__(self) -> None:
        self._gates: dict[tuple[int, Access, int], Gate] = {}  # (peer epoch, access, generation)
        self.newest = 0

    def mint(self) -> int:
        self.newest += 1
        return self.newest

    def lend(self, peer_epoch: int, pages: Sequence[int], access: Access, generation: int | None) -> int:
        generation = self.mint() if generation is None else generation
        self.newest = max(self.newest, generation)
        before = self._gates.get((peer_epoch, access, generation))
        if before is not None:
            before.open = False
        self._gates[peer_epoch, access, generation] = Gate(frozenset(pages))
        return generation

    def find(self, peer_epoch: int, access: Access, generation: int) -> Gate | None:
        gate = self._gates.get((peer_epoch, access, generation))
        return gate if gate is not None and gate.open else None

    def withdraw(self, peer_epoch: int, generation: int) -> bool:
        """True: it was lent, and has to be waited for by a barrier."""
        access: Access
        found = False
        for access in ("write", "read"):
            gate = self._gates.pop((peer_epoch, access, generation), None)
            if gate is not None:
                gate.open, found = False, True
        return found

    def revoke(self, peer_epoch: int, generation: int, pages: frozenset[int] | None) -> None:
        """Shuts every gate of the peer up to `generation` that leads to one of the pages."""
        for key, gate in list(self._gates.items()):
            epoch, _, granted = key
            if epoch == peer_epoch and granted <= generation and not (pages and gate.pages.isdisjoint(pages)):
                gate.open = False
                del self._gates[key]

    def __len__(self) -> int:
        return len(self._gates)
