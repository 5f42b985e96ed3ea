"""Who may speak on a socket: CURVE key pairs, a folder of public keys, and the authenticator that reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from quiesce.channel.private import check_private

log = logging.getLogger(__name__)

ZAP_DOMAIN = "quiesce"
KEY_CHARACTERS = 40  # 32 bytes as z85


def _write(path: Path, text: str, mode: int) -> None:
    """Replaces `path` at once and never with wider access than `mode`: a reader sees the old or the new file."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
    fresh.replace(path)


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, both halves as 40 characters of z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    def save(self, path: Path) -> None:
        """Writes both halves, readable by this user alone (0600)."""
        _write(path, f"{self.public}\n{self.secret}\n", 0o600)

    @classmethod
    def load(cls, path: Path) -> KeyPair:
        """Raises OSError when unreadable, ValueError when it is not a key pair or others can read it."""
        check_private(path)
        lines = path.read_text("ascii", errors="replace").splitlines()
        if len(lines) != 2 or any(len(line) != KEY_CHARACTERS for line in lines):
            raise ValueError(f"{path} is not a key pair: expected two lines of {KEY_CHARACTERS} characters")
        pair = cls(*lines)
        if zmq.curve_public(pair.secret.encode("ascii")).decode("ascii") != pair.public:
            raise ValueError(f"{path} is not a key pair: its halves do not belong together")
        return pair


class KeyRing:
    """A folder of `<name>.pub` files: the owners of these keys may connect.

    It is read at every handshake, so that adding or removing a file needs no restart of anybody.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, public: str) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self.folder / f"{name}.pub", f"{public}\n", 0o644)

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.pub").unlink(missing_ok=True)

    def names(self) -> dict[str, str]:
        """Public key (z85) -> name. Raises OSError when the folder is unreadable."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.pub")):
            try:
                found[path.read_text("ascii", errors="replace").strip()] = path.stem
            except FileNotFoundError:  # removed between the listing and the reading
                continue
        return found

    def name_of(self, public: str) -> str | None:
        return self.names().get(public)


class _Provider:
    def __init__(self, ring: KeyRing, refused: Callable[[], None]) -> None:
        self._ring = ring
        self._refused = refused

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            name = self._ring.name_of(key.decode("ascii"))
        except OSError as error:  # an exception here would end the authenticator's thread: refuse instead
            log.error("cannot read the key ring %s, refusing a peer: %s", self._ring.folder, error)
            name = None
        if name is None:
            self._refused()
            log.warning("refused a peer whose key is not in %s", self._ring.folder)
        return name is not None


class Authenticator:
    """Answers for one context who may connect. Without a running one, listeners of that context refuse all."""

    def __init__(self, context: zmq.Context[Any], ring: KeyRing) -> None:
        self.refused = 0
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(ZAP_DOMAIN, _Provider(ring, self._count))

    def _count(self) -> None:
        self.refused += 1

    def stop(self) -> None:
        self._thread.stop()


def start_authenticator(context: zmq.Context[Any], ring: KeyRing) -> Authenticator:
    """Lets the owners of the ring's keys connect to this context's listeners; `.stop()` before `context.term()`."""
    return Authenticator(context, ring)
