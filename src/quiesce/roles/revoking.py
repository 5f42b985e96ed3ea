"""Asking the transport for a proof, until it has one or is out of time: the same for whoever lends, or reads."""

from __future__ import annotations

import time
from collections.abc import Callable

from quiesce.core.lending import NotRevoked, Revoked
from quiesce.core.machine import Revoke
from quiesce.core.proofs import Proof
from quiesce.roles.timers import Timers
from quiesce.transfer.interface import FenceProof, Transport

FENCE_PATIENCE = 5.0  # seconds a fence may take before it counts as not to be had
FENCE_POLL = 0.01

Key = tuple[int, frozenset[int] | None]  # a peer's epoch, and the pages in question


class Revoking:
    """Each `Revoke` is answered by one `Revoked` that reaches its generation, or by `NotRevoked`."""

    def __init__(self, transport: Transport, timers: Timers, tell: Callable[[Revoked | NotRevoked], None]) -> None:
        self._transport = transport
        self._timers = timers
        self._tell = tell
        self._asked: dict[Key, tuple[Revoke, float]] = {}

    def ask(self, revoke: Revoke) -> None:
        hopeless = self._transport.caps.fence == "none" and not revoke.dead
        patience = 0.0 if hopeless else FENCE_PATIENCE
        self._asked[revoke.epoch, revoke.pages] = (revoke, time.monotonic() + patience)
        self.turn()

    def turn(self) -> None:
        for key, (asked, until) in list(self._asked.items()):
            proof = self._proof(asked)
            if proof is not None:
                self._asked.pop(key, None)
                self._tell(Revoked(spoken(proof)))
            elif time.monotonic() >= until:
                self._asked.pop(key, None)
                self._tell(NotRevoked(asked.epoch, asked.generation, asked.pages))
            else:
                self._timers.after(FENCE_POLL, "revoke", self.turn)

    def _proof(self, asked: Revoke) -> FenceProof | None:
        """Only a proof of the asked generation ends the asking."""
        proof = self._transport.gone(asked.epoch) if asked.dead else None
        if proof is None or proof.generation < asked.generation:
            proof = self._transport.fence(asked.epoch, asked.generation, asked.pages)
        return None if proof is None or proof.generation < asked.generation else proof

    def __len__(self) -> int:
        return len(self._asked)


def spoken(proof: FenceProof) -> Proof:
    """A transport's proof, in the words of the ledger."""
    if proof.kind == "gone":
        return Proof.gone(proof.peer_epoch, proof.generation)
    return Proof.fenced(proof.peer_epoch, proof.generation, proof.pages)
