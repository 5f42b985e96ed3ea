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
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "isa": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": _commit(),
    }


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
