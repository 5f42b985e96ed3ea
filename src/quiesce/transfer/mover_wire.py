"""What engine, mover and lender say to each other over unix SOCK_SEQPACKET sockets: one packet, one message."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

MAX_JOB_PAGES = 8192
MAX_PACKET = 128 << 10
ATTACH_SECONDS = 5.0  # a handshake that takes longer is dropped, by either side
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Packet(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every packet."""


class Descriptor(msgspec.Struct, frozen=True):
    """Where a lender listens and what it lends; travels inside HELLO, so only named peers learn the token."""

    kind: str
    path: str
    token: bytes
    epoch: int
    region: int
    pages: int
    page_bytes: int
    access: Literal["write", "read", "both"] = "write"  # what movers may do here, and how they map it


# ---------------------------------------------------------------- engine -> mover


class Attach(Packet, frozen=True):
    peer: int  # the engine's number for this connection
    own_epoch: int
    lender: Descriptor


class Detach(Packet, frozen=True):
    peer: int


class Job(Packet, frozen=True):
    """Copy page `src[i]` to page `dst[i]`, in order; both are native int32 arrays. `read`: from the lender's pool
    into the engine's own; otherwise the other way."""

    id: int
    peer: int
    region: int
    generation: int
    src: bytes
    dst: bytes
    read: bool = False


# ---------------------------------------------------------------- mover -> engine


class Attached(Packet, frozen=True):
    peer: int
    generation: int


class Placed(Packet, frozen=True):
    """These jobs are done, in this order, and their bytes visible: what ended together is told together."""

    jobs: list[int]


class Dropped(Packet, frozen=True):
    """The job is over without being finished, and no byte of it is written after this."""

    job: int
    reason: str


class Lost(Packet, frozen=True):
    """No longer attached; `final`: the lender's process or its consent is gone, asking again is useless."""

    peer: int
    reason: str
    final: bool


# ---------------------------------------------------------------- mover -> lender


class Greet(Packet, frozen=True):
    token: bytes
    epoch: int  # of the engine that this mover serves


class Answer(Packet, frozen=True):
    """Carries a pidfd of the engine that the mover serves; one of an older version does not."""

    nonce: bytes


class Mapped(Packet, frozen=True):
    generation: int


# ---------------------------------------------------------------- lender -> mover


class Challenge(Packet, frozen=True):
    nonce: bytes


class Memory(Packet, frozen=True):
    """Carries the pool's memfd."""

    generation: int
    region: int
    pages: int
    page_bytes: int


class TurnedAway(Packet, frozen=True):
    reason: str
    final: bool


EngineDecoder = msgspec.msgpack.Decoder(Placed | Dropped | Attached | Lost)
MoverDecoder = msgspec.msgpack.Decoder(Attach | Detach | Job)
LenderDecoder = msgspec.msgpack.Decoder(Greet | Answer | Mapped)
AttachDecoder = msgspec.msgpack.Decoder(Challenge | Memory | TurnedAway)
_encode = msgspec.msgpack.Encoder().encode
# plain numbers: joining enum members costs more than the call that they are for
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_HEAR = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)
_RECEIVE = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_SPACE = socket.CMSG_SPACE(4 * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)


class Closed(Exception):
    """The other end is closed or its process is dead."""


class Malformed(Exception):
    """The other end sent what is not a packet of this conversation."""


@dataclass(frozen=True)
class Received:
    packet: Any
    fds: list[int]
    pid: int | None  # of the sender as the kernel knows it, where SO_PASSCRED is set


def send(sock: socket.socket, packet: Packet, fds: tuple[int, ...] = ()) -> bool:
    """False: the other end does not read fast enough and nothing was sent. Raises Closed."""
    try:
        if fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            sock.sendmsg([_encode(packet)], [rights], _SEND)
        else:
            sock.send(_encode(packet), _SEND)
    except BlockingIOError:
        return False
    except OSError as error:
        raise Closed(str(error)) from error
    return True


class Hearing:
    """Packets between an engine and its own mover, which carry no descriptors: into one buffer, again and again."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._sock, self._decode = sock, decoder.decode
        self._buffer = memoryview(bytearray(MAX_PACKET))

    def next(self) -> Any:
        """The next packet; None: nothing there yet. Raises Closed or Malformed."""
        try:
            size = self._sock.recv_into(self._buffer, MAX_PACKET, _HEAR)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Closed(str(error)) from error
        if not size:
            raise Closed("closed by the other end")
        if size > MAX_PACKET:
            raise Malformed("packet too long")
        try:
            return self._decode(self._buffer[:size])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Malformed(str(error)) from error


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Received | None:
    """The next packet; None: nothing there yet. Raises Closed or Malformed; received descriptors never leak."""
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, _SPACE, _RECEIVE)
    except BlockingIOError:
        return None
    except OSError as error:
        raise Closed(str(error)) from error
    fds, pid = _unpack(ancillary)
    try:
        if not data:
            raise Closed("closed by the other end")
        if flags & _CUT:
            raise Malformed("packet too long")
        packet = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        close_all(fds)
        raise Malformed(str(error)) from error
    except (Closed, Malformed):
        close_all(fds)
        raise
    return Received(packet, fds, pid)


def _unpack(ancillary: list[tuple[int, int, bytes]]) -> tuple[list[int], int | None]:
    fds: list[int] = []
    pid = None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights = array.array("i")
            rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
            fds.extend(rights)
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
    return fds, pid


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that made the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def require_sealed(fd: int, size: int) -> None:
    """Raises ValueError unless `fd` holds at least `size` bytes that nobody can take away under a mapping."""
    if os.fstat(fd).st_size < size:
        raise ValueError(f"shared memory holds {os.fstat(fd).st_size} bytes, {size} were promised")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("not a sealable memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the memfd is not sealed against shrinking: make it with shared_arena()")
