"""Connections that wait at a listening socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any


def incoming(
    listener: socket.socket, most: int, log: logging.Logger, whom: str
) -> Iterator[tuple[socket.socket, Any]]:
    """Those that wait now, `most` at the most, each with its address; of a socket that does not block."""
    for _ in range(most):
        try:
            yield listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("cannot accept %s: %s", whom, error)
            return
