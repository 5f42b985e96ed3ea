"""The end of a process in which an engine may still have a thread of ours."""

from __future__ import annotations

import logging
import os
import sys

from quiesce.transfer.couriers import inside_engines

log = logging.getLogger("quiesce.transfer")


def leave(code: int) -> None:
    """Returns where no engine has a thread of ours; otherwise the process ends here, with this exit code.

    A call of an engine cannot be called back: it ends when a peer that stood still goes on, or is gone. If the
    interpreter has ended by then, C++ aborts the process (Mooncake 0.3.13.post1, Python 3.11)."""
    kept = inside_engines()
    if not kept:
        return
    log.warning("leaving with %d calls of a transfer engine not back: %s", len(kept), ", ".join(t.name for t in kept))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
