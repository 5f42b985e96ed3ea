"""How a worker's process ends although an engine has not let go of one of its threads, or would crash its end."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import atexit, sys, threading
from types import SimpleNamespace
from quiesce.cli import _run_worker
from quiesce.transfer.couriers import EngineThread

def run(settings):
    EngineThread("quiesce-courier", threading.Event().wait)
    return 75

atexit.register(print, "the interpreter ended")
sys.exit(_run_worker(run, SimpleNamespace(log_level="warning", log_format="text", name="decode-0")))
"""


def test_the_interpreter_does_not_end_under_a_call_of_an_engine() -> None:
    """C++ that comes back to an interpreter which has ended aborts the process, and its exit code is lost."""
    ended = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=170, check=False)
    assert (ended.returncode, ended.stdout) == (75, "") and "quiesce-courier" in ended.stderr


TWO_COPIES = """
import atexit, ctypes, sys
from types import SimpleNamespace
from quiesce.cli import _run_worker

def run(settings):
    for library in sys.argv[1:]:
        ctypes.CDLL(library)
    return 75

atexit.register(print, "the interpreter ended")
sys.exit(_run_worker(run, SimpleNamespace(log_level="warning", log_format="text", name="decode-0")))
"""


@pytest.mark.parametrize(("copies", "said"), [(1, "the interpreter ended\n"), (2, "")])
def test_two_copies_of_libnl_are_not_ended_with_the_process(copies: int, said: str, tmp_path: Path) -> None:
    """The destructors of the second one crash, and the exit code is lost."""
    words = [sys.executable, "-c", TWO_COPIES, *_libnl(copies, tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (75, said), ended.stderr


LANE = """
import atexit, ctypes, json, runpy, sys
from dataclasses import asdict
from quiesce.options import HandOffOptions

for library in sys.argv[1:]:
    ctypes.CDLL(library)
atexit.register(print, "the interpreter ended")
sys.argv = ["doctor_transfer", "no-such-engine", json.dumps(asdict(HandOffOptions()), default=str)]
runpy.run_module("quiesce.ops.doctor_transfer", run_name="__main__")
"""


@pytest.mark.parametrize("copies", [1, 2])
def test_a_lane_that_the_doctor_tries_ends_without_them_as_well(copies: int, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LANE, *_libnl(copies, tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    said, *last = ended.stdout.splitlines()
    assert ended.returncode == 0 and "no-such-engine" in said, ended.stderr
    assert last == ["the interpreter ended"][: 2 - copies]


def _libnl(copies: int, folder: Path) -> list[str]:
    """So many libraries that look like it."""
    names = ("libnl-route-3-47cd035c.so.200.26.0", "libnl-route-3.so.200.26.0")[:copies]
    return [str(shutil.copy(_a_library(), folder / name)) for name in names]


def _a_library() -> str:
    """The file of some small library that this process has loaded."""
    ctypes.CDLL("libm.so.6")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split(maxsplit=5)[5] for line in lines if "/libm.so.6" in line or "/libm-" in line)


ENGINE = """
import sys
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.nixl import NixlEngine
from quiesce.transfer.window import Window

engine = NixlEngine("rc")
engine.check()
try:
    engine.lend(Window(shared_arena(1, 4096)))
except Exception as error:  # without a device
    print("no agent:", error, file=sys.stderr)
sys.exit(75)
"""


def test_a_process_that_tried_nixl_over_verbs_ends_with_its_own_code() -> None:
    pytest.importorskip("nixl_cu12")
    ended = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 75, ended.stderr
