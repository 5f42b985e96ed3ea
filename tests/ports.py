"""Ports for servers that are started later: from below the range of which the kernel hands out its own."""

from __future__ import annotations

import os
import random
import socket

FIRST, LAST = 12_000, 32_000
_draw = random.Random(os.getpid() ^ int.from_bytes(os.urandom(8), "little"))


def free_port() -> int:
    """One that nobody listens at. A port that the kernel chose would soon be some client's own end again."""
    while True:
        port = _draw.randrange(FIRST, LAST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
