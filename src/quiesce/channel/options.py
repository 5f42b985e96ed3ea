"""The socket options every end of the channel has: keys, bounds, no linger."""

from __future__ import annotations

from pathlib import Path

import zmq

from quiesce.channel.keys import ZAP_DOMAIN, KeyPair
from quiesce.core.codec import Codec

HIGH_WATER = 1024  # messages queued in each direction, per peer
CURVE_OVERHEAD = 256  # bytes that sealing adds to a message on the wire
RECONNECT_MS = (50, 1000)
HANDSHAKE_MS = 5_000
PATIENT_HANDSHAKE_MS = 600_000  # for links: a peer that is stopped accepts and is silent until it goes on


def apply_bounds(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.RCVHWM, HIGH_WATER)
    socket.set(zmq.MAXMSGSIZE, Codec.MAX_BYTES + CURVE_OVERHEAD)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


def configure_listener(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    apply_bounds(socket)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # an unknown or full peer is an error here, not a silent drop
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
    socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode("ascii"))
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode("ascii"))
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator running: refuse, rather than accept any key


def configure_link(socket: zmq.Socket[bytes], server_public_key: str, keys: KeyPair) -> None:
    apply_bounds(socket)
    socket.set(zmq.HANDSHAKE_IVL, PATIENT_HANDSHAKE_MS)
    socket.set(zmq.IMMEDIATE, 1)  # queue for a peer that is there, never for one that may come
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    socket.set(zmq.CURVE_SERVERKEY, server_public_key.encode("ascii"))
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
    socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode("ascii"))


def remove_socket_file(endpoint: str) -> None:
    """ZeroMQ leaves the file of an `ipc://` endpoint behind."""
    if endpoint.startswith("ipc:///"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
