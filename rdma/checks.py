"""What `make rdma-lab` runs inside the guest: `checks.py ENGINE [CHECK]...`, ENGINE is nixl/rc or mooncake/rdma."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from quiesce.transfer import attach
from quiesce.transfer.agents import AgentTransport
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena
from quiesce.transfer.mooncake import MooncakeEngine
from quiesce.transfer.nixl import NixlEngine

DEVICE, ADDRESS = "rxe0", "10.9.0.1"  # of the guest
PATIENCE = 240.0  # seconds; emulated, and a dead peer is noticed by RDMA's own retries only
LATE = 3.0  # seconds for which pages that were given away are watched
# Done ten times elsewhere is done twice here, 10,000 transfers are 500, and pages have 16 KiB: RDMA in software on an
# emulated processor moves some MB/s.
SCALE, PAGE_BYTES = 0.05, 16 << 10

attach.ATTACH_SECONDS = PATIENCE

ENGINES = {
    "nixl/rc": ("nixl_rc", NixlEngine("rc", devices=f"{DEVICE}:1", on_trial=True)),
    "mooncake/rdma": ("mooncake_rdma", MooncakeEngine("rdma", host=ADDRESS, devices=DEVICE, on_trial=True)),
}


def _make(label: str, run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
    transport = AgentTransport(ENGINES[label][1], run_dir, epoch, max_transfer_pages=100)
    return transport, shared_arena(pages, page_bytes)


def nixl_rc(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
    return _make("nixl/rc", run_dir, epoch, pages, page_bytes)


def mooncake_rdma(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
    return _make("mooncake/rdma", run_dir, epoch, pages, page_bytes)


def main(label: str, names: list[str]) -> int:
    from quiesce.transfer.conformance import bench, report  # noqa: PLC0415

    bench.PATIENCE, bench.WATCH_FOR_LATE = PATIENCE, LATE
    bench.SCALE, bench.PAGE_BYTES = SCALE, PAGE_BYTES
    found = report(f"checks:{ENGINES[label][0]}", names, lambda line: print(line, flush=True))
    print("REPORT " + json.dumps(found), flush=True)
    return int(any(result["result"] == "failed" for result in found["checks"]))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.exit(main(sys.argv[1], sys.argv[2:]))
