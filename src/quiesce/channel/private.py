"""Files with secrets, for their owner alone, and addresses that only this machine reaches."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path


def check_private(path: Path) -> None:
    """Raises ValueError for a file that others can read, OSError for one that is not there.

    Root may own it and let our group read it, as mounted secrets of containers are.
    """
    found = path.stat()
    wide = 0o037 if found.st_uid == 0 and os.getuid() != 0 else 0o077
    if stat.S_IMODE(found.st_mode) & wide:
        mode = stat.S_IMODE(found.st_mode)
        raise ValueError(f"others can read or change {path} (mode {mode:04o}): chmod 600 it, or make new keys")


def create(path: Path, content: bytes, mode: int) -> None:
    """A new file, never with wider access than `mode`. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name that is not `localhost` counts as reachable by others."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
