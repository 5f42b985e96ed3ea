"""How a poster asks a lender to be attached: a small connection beside the engine, kept for as long as it lasts.

Both ends prove that they know the token that HELLO carried, without saying it. Then the lender makes an agent for
this peer and names it. End of file ends the attachment, so that either side hears of the other's death at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct

import msgspec

ATTACH_SECONDS = 10.0  # an attachment that takes longer is given up, by either side
MAX_FRAME = 64 << 10
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SUN_PATH = 107


class Descriptor(msgspec.Struct, frozen=True):
    """Where a lender listens and what it lends; travels inside HELLO, so only its peer learns the token."""

    kind: str  # label of the engine and its lane
    address: str  # unix:/path or tcp:host:port
    token: bytes  # for the peer's epoch only
    epoch: int
    region: int
    pages: int
    page_bytes: int


class Packet(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of every packet."""


class Greet(Packet, frozen=True):
    epoch: int  # of the poster
    challenge: bytes


class Challenge(Packet, frozen=True):
    proof: bytes
    challenge: bytes


class Answer(Packet, frozen=True):
    proof: bytes


class Lent(Packet, frozen=True):
    """An agent is there for the poster. `agent`: as the engine describes it. It must write `trial` to `scratch`.
    `ended`: nothing that was posted under generations up to it lands any more, the lender has seen to that."""

    generation: int
    agent: bytes
    base: int  # address of page 0
    scratch: int
    trial: bytes
    ended: int = 0


class Attached(Packet, frozen=True):
    generation: int


class Settled(Packet, frozen=True):
    """The lender, later: what `Lent.ended` said, and is now."""

    ended: int


class Detached(Packet, frozen=True):
    """The poster has let go of the attachment. Its own agent ends once what is under way has."""


class Ended(Packet, frozen=True):
    """The last word after `Detached`: the poster's agent is no more, and all that it read had arrived before."""


class Refused(Packet, frozen=True):
    reason: str
    final: bool


Decoder = msgspec.msgpack.Decoder(Greet | Challenge | Answer | Lent | Attached | Settled | Detached | Ended | Refused)


class Closed(Exception):
    """The other side has gone, or does not read what it is sent."""


class Malformed(Exception):
    """What was sent means nothing."""


def prove(token: bytes, who: str, *parts: bytes) -> bytes:
    return hmac.new(token, b"|".join((who.encode(), *parts)), hashlib.sha256).digest()


def token_for(secret: bytes, epoch: int) -> bytes:
    return hmac.new(secret, epoch.to_bytes(8, "big"), hashlib.sha256).digest()


class Line:
    """Packets over one non-blocking stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def say(self, packet: Packet) -> None:
        """Raises Closed when it cannot be sent at once: an attachment sends a few hundred bytes in its life."""
        body = msgspec.msgpack.encode(packet)
        data = _LENGTH.pack(len(body)) + body
        try:
            sent = self.sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise Closed(str(error)) from error
        if sent != len(data):
            raise Closed("it does not read what it is sent")

    def hear(self) -> list[Packet]:
        """What has arrived. Raises Closed at end of file, Malformed."""
        try:
            data = self.sock.recv(MAX_FRAME)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("it closed its connection")
        self._buffer += data
        heard: list[Packet] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise Malformed(f"a packet of {length} bytes")
            if len(self._buffer) < _LENGTH.size + length:
                break
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                heard.append(Decoder.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise Malformed(str(error)) from error
        return heard

    def credentials(self) -> tuple[int, int]:
        """(pid, uid) of the process that connected; (0, -1) where the socket cannot tell."""
        if self.sock.family != socket.AF_UNIX:
            return 0, -1
        packed = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(packed)
        return pid, uid

    def is_up(self) -> bool:
        """Whether the other end is still open. Takes nothing that was sent."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.sock.close()


def listen(folder: os.PathLike[str], host: str | None, backlog: int) -> tuple[socket.socket, str]:
    """A listening socket and its address: in `folder`, or with a `host` on a free port of that interface.
    Raises ValueError for a path that is too long, OSError."""
    if host is not None:
        listener = socket.create_server((host, 0), family=_family(host), backlog=backlog)
        listener.setblocking(False)
        return listener, f"tcp:{host}:{listener.getsockname()[1]}"
    path = os.path.join(os.path.realpath(folder), f"a{secrets.token_hex(6)}.sock")
    if len(os.fsencode(path)) > _SUN_PATH:
        raise ValueError(
            f"{path} is longer than {_SUN_PATH} bytes, the most a unix socket can have: "
            "choose a shorter run directory"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # before listen(), so nobody connects earlier
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener, f"unix:{path}"


def unlisten(listener: socket.socket, address: str) -> None:
    listener.close()
    if address.startswith("unix:"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.removeprefix("unix:"))


def check_address(address: str) -> None:
    """Raises ValueError for an address that `dial` cannot take."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    good = rest.startswith("/") and "\0" not in rest and len(rest) <= _SUN_PATH
    if kind == "tcp":
        good = bool(host) and port.isdigit() and 0 < int(port) < 65536
    if kind not in ("unix", "tcp") or not good:
        raise ValueError(f"{address!r} is not where a lender can listen")


def dial(address: str) -> Line:
    """Starts connecting. Raises ConnectionRefusedError when no process listens there, OSError."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock, where = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), rest
    else:
        host, _, port = rest.rpartition(":")
        sock, where = socket.socket(_family(host), socket.SOCK_STREAM), (host, int(port))  # type: ignore[assignment]
    sock.setblocking(False)
    failed = sock.connect_ex(where)
    if failed in (0, errno.EINPROGRESS):
        return Line(sock)
    sock.close()
    if failed in (errno.ENOENT, errno.ECONNREFUSED):
        raise ConnectionRefusedError(failed, os.strerror(failed))
    raise OSError(failed, os.strerror(failed))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
