"""The receiving process of `bench.transfer`: a lender of one engine, or the loop that it is compared with.

python -m bench.transfer_lender layer ENGINE RUN_DIR EPOCH PAGES PAGE_BYTES CORE
python -m bench.transfer_lender bare KIND PAGES PAGE_BYTES CORE
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

from bench.bare import RECEIVERS
from quiesce.transfer import registry
from quiesce.transfer.arena import shared_arena


def layer(engine: str, run_dir: str, epoch: str, pages: str, page_bytes: str) -> None:
    """Serves the transport; a line ["lend", peer epoch, pages] is answered with the generation."""
    setup = registry.Setup(run_dir=Path(run_dir), epoch=int(epoch), max_transfer_pages=256)
    transport = registry.make(engine, setup)
    transport.register(shared_arena(int(pages), int(page_bytes)))
    poller = select.poll()
    for fd in (sys.stdin.fileno(), transport.fileno()):
        poller.register(fd, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        transport.poll()
        transport.events()
        if sys.stdin.fileno() not in ready:
            continue
        line = sys.stdin.readline()
        if not line:
            transport.close_all()
            return
        name, peer, *values = json.loads(line)
        if name == "descriptor":
            answer: object = transport.descriptor(peer).hex()
        else:
            answer = transport.lend(peer, values[0])
        print(json.dumps(answer), flush=True)


def main(arguments: list[str]) -> None:
    mode, kind, *values, core = arguments
    os.sched_setaffinity(0, {int(core)})
    if mode == "layer":
        layer(kind, *values)
    else:
        RECEIVERS[kind](int(values[0]), int(values[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
