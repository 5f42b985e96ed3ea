"""What two tcp transports say to each other: a handshake of small packets, then fixed headers with page bytes behind.

Poster to lender: `Header`, the page numbers (u32), and for a write the pages' bytes in that order. Lender to poster:
`Answer`; for a read one with status DATA, the pages' bytes, and a second one that says how it ended.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

import msgspec

PROTOCOL = 1
MAX_JOB_PAGES = 8192
MAX_PACKET = 4096
HANDSHAKE_SECONDS = 5.0  # one that takes longer is dropped, by either side
MAX_LANES = 16
ANYBODY = 0  # the epoch that stands for no peer in particular


class Malformed(Exception):
    """The other side does not keep to the protocol."""


class Closed(Exception):
    """The connection has ended, or was ended by us."""


class Descriptor(msgspec.Struct, frozen=True):
    """Where a lender listens and what it lends. `holder`: the epoch that `secret` is for, or ANYBODY."""

    kind: str
    host: str
    port: int
    holder: int
    secret: bytes
    epoch: int
    region: int
    pages: int
    page_bytes: int
    lanes: int
    tls: bool


# ---------------------------------------------------------------- the handshake


class Packet(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every packet."""


class Knock(Packet, frozen=True):
    """Poster: `attachment` counts up, a newer one ends the one before; `lane` of `lanes` connections."""

    version: int
    epoch: int
    holder: int
    attachment: int
    lane: int
    lanes: int
    nonce: bytes


class Challenge(Packet, frozen=True):
    nonce: bytes
    proof: bytes


class Response(Packet, frozen=True):
    proof: bytes


class Attached(Packet, frozen=True):
    """Whatever this poster's earlier attachments carried has landed or never will."""

    generation: int


class TurnedAway(Packet, frozen=True):
    reason: str
    final: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Knock | Challenge | Response | Attached | TurnedAway)
_LENGTH = struct.Struct("<I")


def secret_of(master: bytes, holder: int) -> bytes:
    return hmac.digest(master, b"holder" + holder.to_bytes(8, "little"), "sha256")


def proof_of(secret: bytes, side: bytes, knock: Knock, challenge: bytes) -> bytes:
    """The secret itself never travels on these connections."""
    said = side + hashlib.sha256(_encoder.encode(knock)).digest() + challenge
    return hmac.digest(secret, said, "sha256")


def send_packet(sock: socket.socket, packet: Packet) -> None:
    frame = _encoder.encode(packet)
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def receive_packet(sock: socket.socket, deadline: float) -> Packet:
    """Raises Closed, Malformed, or TimeoutError at `deadline` (time.monotonic() seconds)."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, deadline))
    if not 0 < length <= MAX_PACKET:
        raise Malformed(f"a packet of {length} bytes")
    try:
        packet: Packet = _decoder.decode(_exactly(sock, length, deadline))
        return packet
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a packet: {error}") from error


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    """The socket has a timeout, so that a byte now and then does not keep a handshake alive."""
    parts = b""
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left)
        part = sock.recv(size - len(parts))
        if not part:
            raise Closed("closed during the handshake")
        parts += part
    return parts


# ---------------------------------------------------------------- after it


class Kind(IntEnum):
    WRITE = 1
    READ = 2


class Status(IntEnum):
    PLACED = 0
    NOT_OFFERED = 1  # transfer, page or length was not lent: nothing was touched
    REVOKED = 2  # a fence came in between: what came after it touched nothing
    DATA = 3


class Header(NamedTuple):
    kind: int
    region: int
    pages: int
    job: int
    generation: int  # names the grant, and by it the transfer
    length: int  # bytes of all its pages


HEADER = struct.Struct("<BxHIQQQ")
NUMBER = struct.Struct("<I")  # of a page; a job has one at least
ANSWER = struct.Struct("<BxxxIQ")  # status, pages, job


def keep_alive(sock: socket.socket) -> None:
    """A host that has vanished is noticed within two minutes; our own deadlines are the core's, not TCP's."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def ready(sock: socket.socket, event: int, milliseconds: int) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(milliseconds))
