"""How a worker's process ends although an engine has not let go of one of its threads."""

from __future__ import annotations

import subprocess
import sys

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
    ended = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (75, "") and "quiesce-courier" in ended.stderr
