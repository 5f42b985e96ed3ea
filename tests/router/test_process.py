"""The router as a process of its own: starts, answers, drains on SIGTERM, says why it cannot start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from ports import free_port
from router.cluster import make_keys

CODE = """
import sys
from pathlib import Path
from quiesce.router.app import run
from router.cluster import settings_for
keys, model, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
sys.exit(run(settings_for(keys, model, port)))
"""


def start(keys: Path, model: Path, port: int) -> subprocess.Popen[bytes]:
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", CODE, str(keys), str(model), str(port)]
    return subprocess.Popen(command, cwd=tests, stderr=subprocess.PIPE)


def test_it_answers_health_and_ends_with_0_on_sigterm(tmp_path: Path, model_folder: Path) -> None:
    make_keys(tmp_path, ["router"])
    port = free_port()
    process = start(tmp_path, model_folder, port)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60)
                break
            except httpx.ConnectError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
        assert answer.status_code == 503 and len(answer.json()["missing"]) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("fault", ["port", "keys", "model"])
def test_what_cannot_be_used_is_named(tmp_path: Path, model_folder: Path, fault: str) -> None:
    if fault != "keys":
        make_keys(tmp_path, ["router"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if fault == "port" else free_port()
        process = start(tmp_path, tmp_path if fault == "model" else model_folder, port)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    expected = {"port": b"in use", "keys": b"router.key", "model": str(tmp_path).encode()}
    assert b"the router cannot start" in said and expected[fault] in said
    assert b"Traceback" not in said
