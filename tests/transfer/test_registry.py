"""Engines by name: built in, plugged in, missing; and what is done about one that does not work here."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quiesce import cli
from quiesce.engine.errors import EngineError
from quiesce.roles.assembly import make_transport
from quiesce.roles.settings import SettingsError, WorkerSettings
from quiesce.transfer import leaving, nixl, registry
from quiesce.transfer.registry import MissingEngine, Setup
from quiesce.transfer.shm import ShmTransport
from quiesce.transfer.trial import trial

from .broken import LendsAll, OpenGates

ROOT = Path(__file__).parents[2]


def settings(run_dir: Path, **changes: Any) -> WorkerSettings:
    paths = {"model": run_dir, "keys": run_dir, "run_dir": run_dir}
    named = {"role": "decode", "name": "d", "served_model_name": "m", "registry": "r", "registry_public_key": "k"}
    return WorkerSettings(**{**named, **paths, **changes})  # type: ignore[arg-type]


def test_what_is_built_in_is_what_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == registry.BUILT_IN
    for name in declared:
        registry.load(name)


def test_a_name_that_nobody_has_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"--transfer smoke: there is no transfer engine 'smoke'; there are .*tcp"):
        make_transport(settings(tmp_path, transfer="smoke"))
    with pytest.raises(EngineError, match="tcp has no lanes: leave out /fast"):
        make_transport(settings(tmp_path, transfer="tcp/fast"))


def test_a_missing_library_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(
        EngineError, match=r"--transfer nixl: NIXL is not installed: pip install 'quiesce\[nixl\]'"
    ) as said:
        make_transport(settings(tmp_path, transfer="nixl"))
    assert "\n" not in str(said.value)
    assert nixl.MISSING in str(said.value)


def test_auto_goes_without_what_does_not_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(setup: Setup) -> Any:
        raise MissingEngine("pip install it")

    monkeypatch.setitem(registry.BUILT_IN, "mooncake", f"{__name__}:missing")
    monkeypatch.setattr(sys.modules[__name__], "missing", missing, raising=False)
    monkeypatch.setattr(registry, "candidates", lambda: ["mooncake", "shm", "tcp"])
    monkeypatch.setattr(ShmTransport, "self_test", lambda self: ["this kernel is too old"])
    transport = make_transport(settings(tmp_path, transfer="auto"))
    assert transport.caps.label == "tcp"
    transport.close_all()
    assert "auto goes without mooncake: pip install it" in caplog.text
    assert "auto goes without shm: its self-test failed: this kernel is too old" in caplog.text
    with pytest.raises(EngineError, match="--transfer shm: its self-test failed: this kernel is too old"):
        make_transport(settings(tmp_path, transfer="shm"))
    monkeypatch.setattr(registry, "candidates", lambda: ["shm"])
    with pytest.raises(EngineError, match="no transfer engine works on this machine"):
        make_transport(settings(tmp_path, transfer="auto"))


def test_auto_takes_rdma_engines_only_where_there_is_such_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RDMA_DEVICES", tmp_path / "none")
    assert registry.candidates() == ["shm", "tcp"]
    (tmp_path / "some" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(registry, "RDMA_DEVICES", tmp_path / "some")
    assert registry.candidates() == ["shm", "nixl/rc", "mooncake/rdma", "mori", "tcp"]


def test_an_engine_can_be_plugged_in_and_put_to_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = tmp_path / "someones_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nsomeones = someones_engine:make\n")
    (tmp_path / "someones_engine.py").write_text(
        "from quiesce.transfer.tcp import TcpTransport\n"
        "def make(setup):\n"
        "    return TcpTransport(setup.epoch, max_transfer_pages=setup.max_transfer_pages, lanes=1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "someones" in registry.names()
    transport = make_transport(settings(tmp_path, transfer="someones"))
    assert transport.caps.label == "tcp"
    transport.close_all()
    left: list[int] = []
    monkeypatch.setattr(leaving, "leave", left.append)  # it may end this process
    assert cli.main(["conformance", "someones", "--check", "placed_means_visible"]) == 0
    assert "ok " in capsys.readouterr().out
    assert cli.main(["conformance", "nobodys"]) == 2
    assert "no transfer engine 'nobodys'" in capsys.readouterr().err
    assert cli.main(["conformance", "tcp", "--check", "nothing"]) == 2
    assert "there is no check 'nothing'" in capsys.readouterr().err
    assert left == [0, 2, 2]


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="need each other"):
        settings(tmp_path, transfer_tls_cert=tmp_path / "c")


@pytest.mark.parametrize("name", ["shm", "tcp", "null"])
def test_trials_of_what_works_find_nothing(name: str, tmp_path: Path) -> None:
    make = lambda epoch: registry.make(name, Setup(run_dir=tmp_path, epoch=epoch, direction="both"))  # noqa: E731
    transport = make(1)
    assert transport.self_test() == []
    transport.close_all()


def test_a_trial_finds_claims_that_do_not_hold() -> None:
    assert trial(OpenGates) == ["a write under a fenced grant has landed"]
    assert trial(LendsAll) == ["a write under a fenced grant has landed"]
