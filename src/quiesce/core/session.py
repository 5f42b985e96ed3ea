"""Who is at the other end: a peer's epoch, taken only after the echo of a challenge of our own (protocol, 1).

Either side of one connection is a `Handshake`. A challenge is used once; a new HELLO replaces the old one; taking
an epoch cancels every other open challenge, so that a late HELLO of a dead process cannot win.
"""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Confirm,
    Hello,
    Unwelcome,
    Welcome,
)


class Handshake:
    """`draw` gives unpredictable 63-bit numbers. `peer` is the epoch taken, None before that."""

    def __init__(self, epoch: int, rank: int, fingerprint: Fingerprint, draw: Callable[[], int]) -> None:
        self.epoch = epoch
        self.rank = rank
        self.fingerprint = fingerprint
        self.peer: int | None = None
        self.version: int | None = None
        self._draw = draw
        self._open: dict[int, int | None] = {}  # challenge -> the epoch it was put to; None: whoever answers

    def hello(self, descriptor: bytes) -> Hello:
        """Opens, or opens again. The challenge of an earlier HELLO is void."""
        challenge = self._draw()
        self._open = {challenge: None}
        return Hello(
            epoch=self.epoch,
            rank=self.rank,
            challenge=challenge,
            version_min=PROTOCOL_MIN,
            version_max=PROTOCOL_MAX,
            fingerprint=self.fingerprint,
            descriptor=descriptor,
        )

    def on_hello(self, hello: Hello) -> Welcome | Unwelcome:
        """Answers a HELLO; its epoch is not taken yet."""
        version = min(hello.version_max, PROTOCOL_MAX)
        if version < max(hello.version_min, PROTOCOL_MIN):
            ours, theirs = f"{PROTOCOL_MIN}..{PROTOCOL_MAX}", f"{hello.version_min}..{hello.version_max}"
            return Unwelcome(self.epoch, hello.challenge, f"protocol version: {ours} here, {theirs} there")
        difference = self.fingerprint.difference(hello.fingerprint)
        if difference is not None:
            return Unwelcome(self.epoch, hello.challenge, f"the two engines differ in {difference}")
        challenge = self._draw()
        self._open = {challenge: hello.epoch}
        self.version = version
        return Welcome(self.epoch, self.rank, hello.challenge, challenge, version, self.fingerprint)

    def on_welcome(self, welcome: Welcome) -> Confirm | None:
        """Takes the peer's epoch; None when the echo is not of our open challenge."""
        if welcome.echo not in self._open or self._open[welcome.echo] is not None:
            return None
        self._take(welcome.epoch)
        self.version = welcome.version
        return Confirm(self.epoch, self.rank, welcome.challenge)

    def on_confirm(self, confirm: Confirm) -> bool:
        """Takes the epoch that the challenge was put to; False when the echo fits nothing open."""
        if self._open.get(confirm.echo) != confirm.epoch:
            return False
        self._take(confirm.epoch)
        return True

    def _take(self, epoch: int) -> None:
        self.peer = epoch
        self._open.clear()
