"""The end of a process which an engine would crash: it has a thread of ours still, or libraries that end badly."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from quiesce.transfer.couriers import inside_engines

log = logging.getLogger("quiesce.transfer")


def leave(code: int) -> None:
    """Returns where the interpreter can end; otherwise the process ends here, with this exit code.

    A call of an engine cannot be called back: it ends when a peer that stood still goes on, or is gone. If the
    interpreter has ended by then, C++ aborts the process (Mooncake 0.3.13.post1, Python 3.11)."""
    if kept := inside_engines():
        names = ", ".join(thread.name for thread in kept)
        log.warning("leaving with %d calls of a transfer engine not back: %s", len(kept), names)
    elif not _libnl_twice():
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _libnl_twice() -> bool:
    """Two copies of it: the second enters itself into the list of the first, is refused, and its destructor takes out
    what was never in. NIXL's wheel has its own (1.5.1); a libibverbs that is preloaded for its drivers brings the
    system's."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnl-route-3" in line}
    return len(mapped) > 1
