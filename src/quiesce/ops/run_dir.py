"""The folder of one `quiesce serve`: sockets and keys, private to this user, gone when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from quiesce.channel import KeyPair, KeyRing

PREFIX = "quiesce-"
LOCK = "lock"
LONGEST_PATH = 100  # bytes of a socket's path; the system's own limit is 107
LONGEST_NAME = 64  # bytes left for a socket's file name
ROUTER, SUPERVISOR = "router", "supervisor"


class RunDirError(OSError):
    """No usable folder. The text says which one and what to set."""


def _root() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = ([Path(runtime)] if runtime else []) + [Path(tempfile.gettempdir())]
    for folder in candidates:
        longest = len(os.fsencode(folder)) + len(PREFIX) + 8 + LONGEST_NAME + 2
        if longest <= LONGEST_PATH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise RunDirError(
        f"No folder for sockets: {' and '.join(map(str, candidates))} cannot be written or are too long "
        f"({LONGEST_PATH} bytes with the socket's name). Set XDG_RUNTIME_DIR to a short, writable folder."
    )


def _own(folder: Path) -> int:
    """Takes the folder's lock; whoever holds it lives. It appears in the folder only once it is held."""
    fresh = folder / f"{LOCK}.{os.getpid()}"
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(folder / LOCK)
    return fd


def remove_abandoned(root: Path) -> list[Path]:
    """Removes the folders of supervisors that were killed: their lock is free. Returns what was removed."""
    removed = []
    for lock in root.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.parent.stat().st_uid != os.getuid():
                continue
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # somebody else's, or just being removed
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
            removed.append(lock.parent)
        except OSError:
            continue
        finally:
            os.close(fd)
    return removed


class RunDir:
    """`path` (0700) holds `registry`, the workers' sockets and `keys/`. Raises RunDirError."""

    def __init__(self) -> None:
        root = _root()
        with contextlib.suppress(OSError):
            remove_abandoned(root)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # mode 0700
        self._lock = _own(self.path)
        self.keys = self.path / "keys"
        self.keys.mkdir(mode=0o700)
        self.ring = KeyRing(self.keys / "ring")
        for name in (ROUTER, SUPERVISOR):
            self.fresh_keys(name)

    @property
    def registry(self) -> str:
        return f"ipc://{self.path / 'registry'}"

    @property
    def admin(self) -> str:
        """Where operators speak to the router: this user alone can."""
        return f"unix://{self.path / 'admin'}"

    @property
    def router_public_key_file(self) -> Path:
        return self.ring.folder / f"{ROUTER}.pub"

    def fresh_keys(self, name: str) -> KeyPair:
        """A new pair under this name; the old one opens no new session from now on (guard A14)."""
        pair = KeyPair.generate()
        pair.save(self.keys / f"{name}.key")
        self.ring.add(name, pair.public)
        return pair

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
