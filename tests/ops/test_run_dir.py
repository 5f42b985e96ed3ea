from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiesce.channel import KeyPair
from quiesce.ops.run_dir import LONGEST_NAME, LONGEST_PATH, RunDir, RunDirError


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qt") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_the_folder_is_private_short_and_gone_after_remove(root: Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == root
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    assert len(str(run_dir.path / ("x" * LONGEST_NAME))) < LONGEST_PATH
    run_dir.remove()
    run_dir.remove()
    assert list(root.iterdir()) == []


def test_a14_each_start_of_a_worker_gets_a_new_key_and_the_old_one_is_out_of_the_ring(root: Path) -> None:
    run_dir = RunDir()
    first = run_dir.fresh_keys("prefill-0")
    second = run_dir.fresh_keys("prefill-0")
    assert run_dir.ring.name_of(first.public) is None
    assert run_dir.ring.name_of(second.public) == "prefill-0"
    assert KeyPair.load(run_dir.keys / "prefill-0.key") == second
    assert sorted(run_dir.ring.names().values()) == ["prefill-0", "router", "supervisor"]
    run_dir.remove()


def test_the_folder_of_a_killed_supervisor_is_removed_by_the_next_and_a_living_one_is_not(root: Path) -> None:
    living = RunDir()
    script = "from quiesce.ops.run_dir import RunDir; r = RunDir(); print(r.path, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    killed = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert killed.is_dir()
    latest = RunDir()
    assert sorted(root.iterdir()) == sorted([living.path, latest.path])
    latest.remove()
    living.remove()


def test_a_folder_that_cannot_hold_sockets_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * LONGEST_PATH)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(deep))
    monkeypatch.setattr("tempfile.tempdir", os.fspath(deep))
    with pytest.raises(RunDirError, match="Set XDG_RUNTIME_DIR to a short, writable folder"):
        RunDir()
