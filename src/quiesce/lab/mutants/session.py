"""The handshake with its rule about open challenges removed (protocol, story 20)."""

from __future__ import annotations

from typing import Any

from quiesce.core.session import Handshake
from quiesce.lab.mutants import arenas
from quiesce.lab.mutants.patch import mutant

real_hello = Handshake.on_hello


@mutant(
    "challenges",
    "A14",
    "a challenge stays open beside a newer one, and after an epoch was taken",
    arenas.HANDSHAKE,
    (Handshake, "on_hello"),
    (Handshake, "_take"),
)
def challenges(self: Handshake, what: Any) -> Any:
    if isinstance(what, int):
        self.peer = what  # _take
        return None
    before = dict(self._open)
    answer = real_hello(self, what)
    self._open.update(before)
    return answer
