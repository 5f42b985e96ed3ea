"""What the figures were taken on, and whether it was quiet."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

BUSY = 0.5  # load average before we begin, above which something else is running


def describe() -> dict[str, object]:
    """CPU, memory and versions; the commit, with "+" when files differ from it."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "isa": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags()],
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": _commit(),
    }


def flags() -> list[str]:
    """The CPU's, as Linux names them; none on an architecture that has none."""
    return next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()


def noise(when: str) -> str | None:
    """A sentence when the machine is busy with something else now, before any of our own work."""
    load = os.getloadavg()[0]
    if load <= BUSY:
        return None
    return f"load average {load:.2f} {when}: others use this machine, absolute figures are lower bounds"


def _commit() -> str:
    root = Path(__file__).parent.parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def core_seconds(group: int) -> float:
    """CPU time that the living processes of a process group have used, in hundredths of a second."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def workers_of(serve: int) -> dict[str, int]:
    """Role -> pid of the workers that a `quiesce serve` has started."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            words = stat.with_name("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == serve and words[1:3] == [b"-m", b"quiesce"] and words[3] != b"router":
            found[words[3].decode()] = int(stat.parent.name)
    return found


def children_of(pid: int) -> list[int]:
    """Processes that a living process has started and not yet reaped."""
    told = (task.read_text(encoding="ascii") for task in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for children in told for child in children.split()]


def gib_of(pid: int) -> float:
    """A process's resident memory; pages that it shares with others count in full."""
    lines = _lines(f"/proc/{pid}/status")
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 2**20
