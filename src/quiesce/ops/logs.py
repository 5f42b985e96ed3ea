"""Log lines of a process: one format for all roles; the supervisor puts the process's name in front."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """level: debug, info, warning or error. To stderr."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
