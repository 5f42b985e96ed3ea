"""TLS before HTTP: who connects is bounded and timed from the first moment, like a connection without a request.

Who shows no certificate, or one of another authority, or one that has ended, never gets to HTTP; each is counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable

from quiesce.router.http import Gate

log = logging.getLogger(__name__)

TOLD_SECONDS = 1.0  # between two lines in the log: a flood of strangers must not fill it
SPARE_SECONDS = 1.0  # the gate's own clock comes first
SHUTDOWN_SECONDS = 2.0  # for a peer to say that it has heard the end
BREATH = 0.05  # seconds until the next try where the system has no descriptor left


class Handshake:
    """One connection, from being accepted to the end of its handshake."""

    def __init__(self, door: TlsDoor, sock: socket.socket, peer: str) -> None:
        self._door, self._sock, self._peer = door, sock, peer
        self._task = asyncio.get_running_loop().create_task(self._run(), name="TLS handshake")

    def abort(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        door, loop = self._door, asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                door.make,
                self._sock,
                ssl=door.context,
                ssl_handshake_timeout=door.gate.seconds + SPARE_SECONDS,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except OSError as error:
            door.refused(error, self._peer)
        except asyncio.CancelledError:  # by the gate, which has counted it, or by `close`
            pass
        finally:
            door.leave(self)


class TlsDoor:
    """Accepts for one HTTP port; in the place of an asyncio server. Make it inside the running loop."""

    def __init__(
        self, listening: socket.socket, gate: Gate, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]
    ) -> None:
        self.gate, self.context, self.make = gate, context, make
        self._listening = listening
        self._shaking: set[Handshake] = set()
        self._told = 0.0
        listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="TLS accept")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listening)
            except OSError as error:
                log.error("no connection can be accepted: %s", error)
                await asyncio.sleep(BREATH)
                continue
            sock.setblocking(False)
            if not self.gate.let_in():
                sock.close()
                continue
            shake = Handshake(self, sock, str(address[0]) if address else "?")
            self._shaking.add(shake)
            self.gate.await_head(shake)

    def refused(self, error: OSError, peer: str) -> None:
        reason = getattr(error, "reason", "") or ""
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            kind, why = "tls_no_certificate", "it shows no certificate"
        elif isinstance(error, ssl.SSLCertVerificationError):
            kind, why = "tls_bad_certificate", f"its certificate: {error.verify_message}"
        else:
            kind, why = "tls_failed", f"no TLS handshake: {reason or error or type(error).__name__}"
        self.gate.count(kind)
        if time.monotonic() - self._told >= TOLD_SECONDS:
            self._told = time.monotonic()
            log.warning("a connection from %s is refused, %s", peer, why)

    def leave(self, shake: Handshake) -> None:
        """It is HTTP's now, which has counted it anew, or gone."""
        self._shaking.discard(shake)
        self.gate.head_came(shake)
        self.gate.open -= 1

    def close(self) -> None:
        self._accepting.cancel()
        for shake in list(self._shaking):
            shake.abort()

    async def wait_closed(self) -> None:
        while self._shaking:
            await asyncio.sleep(0)
