"""What this machine and this installation must have: versions, native step, kernel, clock, limits, shared memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path

from quiesce.core.messages import PROTOCOL_MAX, PROTOCOL_MIN
from quiesce.engine.errors import EngineError
from quiesce.engine.native import library
from quiesce.ops.doctor_finding import Finding, fail, ok, warn
from quiesce.ops.run_dir import RunDir
from quiesce.transfer.arena import SEALS, shared_arena
from quiesce.transfer.registry import rdma_devices

OLDEST_PYTHON = (3, 11)
OLDEST_KERNEL = (5, 3)  # pidfd_open
COARSEST_CLOCK = 1e-3  # seconds; repeats and leases count in tens of milliseconds
SPARE_FILES = 1024  # of the router, beyond two for each request
WORKER_FILES = 1024
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
SCRATCH = 16 << 20  # bytes


def versions(python: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Python, torch as it loads, and what is spoken on the wire."""
    name = "versions"
    if python[:2] < OLDEST_PYTHON:
        return fail(name, f"Python {_dotted(python)}", f"Use Python {_dotted(OLDEST_PYTHON)} or newer.")
    try:
        torch = import_module("torch").__version__
    except (ImportError, OSError) as error:
        return fail(name, f"torch does not load: {error}", "Install Quiesce again in a fresh virtual environment.")
    spoken = f"{PROTOCOL_MIN}" if PROTOCOL_MIN == PROTOCOL_MAX else f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
    found = f"quiesce {metadata.version('quiesce')}, protocol {spoken}, Python {_dotted(python)}, torch {torch}"
    return ok(name, f"{found} ({platform.machine()})")


def packages() -> Finding:
    """The installed distributions against those that this version asks for."""
    wrong = []
    for line in metadata.requires("quiesce") or []:
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        if match is None:
            continue
        try:
            have = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            have = "missing"
        if have.partition("+")[0] != match[2]:  # +cpu and the like name a build
            wrong.append(f"{match[1]} {have} (asked for: {match[2]})")
    if wrong:
        return warn("packages", "; ".join(wrong), "Install Quiesce again, in an environment of its own.")
    return ok("packages", "the versions that this one was tested with")


def native_step(level: str, device: str) -> Finding:
    """Every build that is here is loaded; `level` and `device` as in `quiesce serve`."""
    name = "native step"
    try:
        for built in library.levels():
            library.load(built)
        chosen, how = library.choose(level, device)
    except EngineError as error:
        return fail(name, str(error), "Install Quiesce again, or leave out --native-level.")
    if chosen is None and device == "cpu" and level == library.AUTO:
        there = "there is one" if shutil.which("c++") or shutil.which("g++") else "there is none"
        return warn(name, f"{how} (C++ compiler: {there})", "apt install g++, then install Quiesce again.")
    best = library.supported()[0]
    if chosen is not None and level == library.AUTO and chosen.level != best:
        return warn(name, f"{how}; this CPU could run {best}", "Install Quiesce again with a newer C++ compiler.")
    return ok(name, how)


def kernel(system: str = platform.system(), release: str = platform.release()) -> Finding:
    match = re.match(r"(\d+)\.(\d+)", release)
    if system != "Linux" or match is None:
        return fail("kernel", f"{system} {release}", "Quiesce runs on Linux: it needs memfd, pidfd and eventfd.")
    if (int(match[1]), int(match[2])) < OLDEST_KERNEL:
        return fail("kernel", f"Linux {release}", f"Use Linux {_dotted(OLDEST_KERNEL)} or newer (pidfd_open).")
    return ok("kernel", f"Linux {release}")


def cores(workers: int, threads: int, have: int) -> Finding:
    """`have`: CPUs that this process may use."""
    found = f"{have} CPUs for {workers} workers of {threads} threads"
    if workers * threads > have:
        return warn("cores", found, "Engines take turns and slow each other down: lower --threads or the workers.")
    return ok("cores", found)


def clock(read: Callable[[], float] = time.monotonic, samples: int = 2000, source: Path = CLOCK_SOURCE) -> Finding:
    """Deadlines, repeats and leases go by the monotonic clock. None goes by the time of day."""
    name = "clock"
    info = time.get_clock_info("monotonic")
    times = [read() for _ in range(samples)]
    steps = [after - before for before, after in pairwise(times)]
    if not info.monotonic or min(steps) < 0:
        back = -min(steps)
        return fail(name, f"the monotonic clock went back by {back:g} s", "Update kernel or hypervisor.")
    forward = [step for step in steps if step > 0]
    if not forward or min(forward) > COARSEST_CLOCK:
        step = f"goes in steps of {min(forward):g} s" if forward else "stands still"
        return fail(name, f"the monotonic clock {step}", f"It must tell {COARSEST_CLOCK:g} s apart: see {source}.")
    using = source.read_text().strip() if source.is_file() else "unknown"
    found = f"monotonic, finest step seen {min(forward) * 1e9:.0f} ns, source {using}; the time of day plays no part"
    if using in SLOW_SOURCES:
        return warn(name, found, f"Reading {using} is slow: echo tsc > {source}, where the machine has it.")
    return ok(name, found)


def open_files(max_inflight: int, limits: tuple[int, int] | None = None) -> Finding:
    """The router raises its soft limit to what it needs; the hard one is what binds. `limits`: soft, hard."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    need = max(2 * max_inflight + SPARE_FILES, WORKER_FILES)
    found = f"{_limit(soft)} soft, {_limit(hard)} hard; {need} needed for --max-inflight {max_inflight}"
    if hard not in (resource.RLIM_INFINITY, -1) and hard < need:
        return fail(
            "open files", found, f"Raise the hard limit to {need} (LimitNOFILE=, ulimits) or lower the option."
        )
    if soft not in (resource.RLIM_INFINITY, -1) and soft < WORKER_FILES:
        return warn("open files", found, f"ulimit -n {WORKER_FILES}: workers keep the soft limit.")
    return ok("open files", found)


def locked_memory(need: int, devices: list[str] | None = None, limit: int | None = None) -> Finding:
    """RDMA pins whole pools. `need`, `limit` in bytes."""
    name = "locked memory"
    devices = rdma_devices() if devices is None else devices
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if not devices:
        return ok(name, f"{_bytes(limit)}; no RDMA device here, so nothing is pinned")
    found = f"{_bytes(limit)} may be locked; a pool of {_bytes(need)} is pinned for {', '.join(devices)}"
    if limit not in (resource.RLIM_INFINITY, -1) and limit < need:
        return fail(name, found, "ulimit -l unlimited (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1).")
    return ok(name, found)


def shared_memory(size: int = SCRATCH) -> Finding:
    """A sealed memfd is made, its descriptor passed over a socket, and the same memory seen on the other side."""
    try:
        arena = shared_arena(1, size)
        assert arena.fd is not None
        passed = _passed(arena.fd)
        try:
            with mmap.mmap(passed, size) as seen:
                arena.pages[0, -1] = 7
                same = seen[size - 1] == 7
            sealed = fcntl.fcntl(passed, fcntl.F_GET_SEALS) & SEALS == SEALS
        finally:
            os.close(passed)
            os.close(arena.fd)
    except OSError as error:
        return fail(
            "shared memory",
            f"a sealed memfd of {_bytes(size)} could not be had or passed on: {error}",
            "Allow memfd_create, F_ADD_SEALS and SCM_RIGHTS (seccomp), and give the container more memory.",
        )
    if not (same and sealed):
        return fail("shared memory", "a passed memfd is not the same sealed memory", "Use another kernel or sandbox.")
    return ok("shared memory", f"a sealed memfd of {_bytes(size)} passed over a socket is one memory on both sides")


def _passed(fd: int) -> int:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        socket.send_fds(here, [b"x"], [fd])
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
    if len(fds) != 1:
        raise OSError("the descriptor did not arrive (SCM_RIGHTS)")
    return fds[0]


def pidfd(opened: Callable[[int], int] = os.pidfd_open) -> Finding:
    """The end of a process is seen through its pidfd: that it is dead is a proof, that it is silent is none."""
    try:
        fd = opened(os.getpid())
        try:
            signal.pidfd_send_signal(fd, 0)
        finally:
            os.close(fd)
    except OSError as error:
        return fail(
            "pidfd", f"pidfd_open does not work: {error}", "Allow pidfd_open and pidfd_send_signal (seccomp)."
        )
    return ok("pidfd", "a process's end can be seen and told from its silence")


def ptrace(transfer: str, scope: Path = PTRACE_SCOPE) -> Finding:
    """One process copying into another one's memory (cma) needs the kernel's leave."""
    value = scope.read_text().strip() if scope.is_file() else "0"
    found = f"yama ptrace_scope is {value}"
    if transfer.endswith("/cma") and value != "0":
        return fail(
            "ptrace", f"{found}: one worker may not write into another's memory", f"echo 0 > {scope}, or shm."
        )
    return ok("ptrace", f"{found}; only lanes that are called cma depend on it")


def run_folder() -> Finding:
    """A folder for sockets and keys as `quiesce serve` makes it, with its lock, and away again."""
    try:
        made = RunDir()
    except OSError as error:
        return fail("run folder", str(error), "Set XDG_RUNTIME_DIR to a short, writable folder of this user.")
    try:
        wide = [path.name for path in made.keys.glob("*.key") if path.stat().st_mode & 0o077]
        if wide or made.path.stat().st_mode & 0o077:
            return fail("run folder", f"others can read {made.path.parent}'s files", "Use a file system with modes.")
        return ok("run folder", f"{made.path.parent}: private, its lock works")
    finally:
        made.remove()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _limit(value: int) -> str:
    return "unlimited" if value in (resource.RLIM_INFINITY, -1) else str(value)


def _bytes(value: int) -> str:
    if value in (resource.RLIM_INFINITY, -1):
        return "unlimited"
    return f"{value / 2**30:.1f} GiB" if value >= 1 << 30 else f"{value / 2**20:.1f} MiB"
