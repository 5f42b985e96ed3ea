"""What `make rdma-lab` runs inside the guest: `checks.py ENGINE SECONDS [CHECK]...`.

ENGINE is nixl/rc or mooncake/rdma. After SECONDS no further check is begun: what is left is said to be not run. A
REPORT line after each check holds all results until then, so that a run that is cut short has shown something.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import handoffs

from quiesce.transfer import attach
from quiesce.transfer.agents import AgentTransport, Use
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.conformance import CHECKS, bench, check_engine
from quiesce.transfer.conformance.run import Check, capabilities
from quiesce.transfer.interface import Arena
from quiesce.transfer.leaving import leave
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


def make(label: str, run_dir: Path, epoch: int, direction: Use = "both") -> AgentTransport:
    return AgentTransport(ENGINES[label][1], run_dir, epoch, direction=direction, max_transfer_pages=100)


def nixl_rc(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
    return make("nixl/rc", run_dir, epoch), shared_arena(pages, page_bytes)


def mooncake_rdma(run_dir: Path, epoch: int, pages: int, page_bytes: int) -> tuple[AgentTransport, Arena]:
    return make("mooncake/rdma", run_dir, epoch), shared_arena(pages, page_bytes)


def _with_a_model(label: str, names: list[str]) -> list[Check]:
    """They load torch, which takes minutes here: neither the suite nor its parties need it."""
    if names and not any(name.startswith("a_model") for name in names):
        return []
    import answers  # noqa: PLC0415

    return answers.all_of(label, ADDRESS)


def main(label: str, seconds: float, names: list[str]) -> int:
    bench.PATIENCE, bench.WATCH_FOR_LATE = PATIENCE, LATE
    bench.SCALE, bench.PAGE_BYTES = SCALE, PAGE_BYTES
    until = time.monotonic() + seconds
    engine = f"checks:{ENGINES[label][0]}"
    caps = capabilities(engine)
    print(f"{label}: " + ", ".join(f"{name} {value}" for name, value in caps.items() if name != "name"), flush=True)
    results = []
    handed_over = handoffs.all_of(lambda run_dir, epoch, direction: make(label, run_dir, epoch, direction))
    with_a_model = _with_a_model(label, names)
    for check in [*handed_over, *with_a_model, *CHECKS]:
        if names and check.__name__ not in names:
            continue
        if time.monotonic() > until:
            result = {"check": check.__name__, "result": "not run", "said": "no time was left", "seconds": 0.0}
        else:
            (result,) = check_engine(engine, [check])
        results.append(result)
        said = f": {result['said']}" if result["said"] else ""
        print(f"{result['result']:<12}{result['seconds']:>8.2f} s  {result['check']}{said}", flush=True)
        found = {"engine": label, "capabilities": caps, "checks": results, "scale": SCALE}
        print("REPORT " + json.dumps(found), flush=True)
    return int(any(result["result"] == "failed" for result in results))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    code = main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    leave(code)
    sys.exit(code)
