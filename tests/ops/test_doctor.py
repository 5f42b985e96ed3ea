"""`quiesce doctor`: every check passes on what is right and fails on what is not."""

from __future__ import annotations

import json
import os
import resource
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import by_name, said

from quiesce import cli
from quiesce.engine.native import library
from quiesce.ops import doctor, doctor_cluster, doctor_model, doctor_system
from quiesce.ops.doctor_finding import Finding, fail, guarded, ok, warn
from quiesce.ops.doctor_report import bundle, exit_code
from quiesce.options import (
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
)
from quiesce.options_router import RoutingOptions
from tiny_model import make_tiny_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", context=512)


# ------------------------------------------------------------ the machine


def test_the_machine_of_the_tests_passes():
    for check in (doctor_system.kernel, doctor_system.clock, doctor_system.shared_memory, doctor_system.pidfd):
        said(check(), "ok")
    said(doctor_system.versions(), "ok", "protocol 1", "torch")


def test_versions_fail_for_an_old_python_and_a_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch):
    said(doctor_system.versions((3, 10, 4)), "fail", "3.10.4", "3.11")

    def broken(name: str) -> Any:
        raise ImportError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr(doctor_system, "import_module", broken)
    said(doctor_system.versions(), "fail", "libtorch.so")


def test_packages_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch):
    asked = ["pyzmq==0.1", "no-such-thing==1.0", 'nixl-cu12==9.9; extra == "nixl"']
    monkeypatch.setattr(doctor_system.metadata, "requires", lambda name: asked)
    finding = doctor_system.packages()
    said(finding, "warn", "pyzmq", "asked for: 0.1", "no-such-thing missing")
    assert "nixl" not in finding.found


def test_native_step_that_is_missing_or_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said(doctor_system.native_step("off", "cpu"), "ok", "is off")
    said(doctor_system.native_step("avx2", "cuda"), "fail", "CPU")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    said(doctor_system.native_step("auto", "cpu"), "warn", "was not built", "g++")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)  # it keeps what it has loaded
    (tmp_path / f"_{library.supported()[-1]}.so").write_bytes(b"of another version")
    said(doctor_system.native_step("off", "cpu"), "fail", "install Quiesce again")


@pytest.mark.parametrize(("system", "release"), [("Linux", "4.18.0-el8"), ("Darwin", "23.1.0"), ("Linux", "?")])
def test_kernels_that_are_too_old_or_none(system: str, release: str):
    said(doctor_system.kernel(system, release), "fail", release)


def test_cores_are_counted():
    said(doctor_system.cores(2, 1, have=2), "ok")
    said(doctor_system.cores(2, 4, have=4), "warn", "--threads")


def ticking(*steps: float) -> Callable[[], float]:
    now, number = [0.0], [0]

    def read() -> float:
        now[0] += steps[number[0] % len(steps)]
        number[0] += 1
        return now[0]

    return read


def test_clocks_that_go_back_stand_still_or_jump():
    said(doctor_system.clock(ticking(1e-6)), "ok", "1000 ns")
    said(doctor_system.clock(ticking(1e-6, 1e-6, -0.5)), "fail", "went back by 0.5 s")
    said(doctor_system.clock(ticking(0.0)), "fail", "stands still")
    said(doctor_system.clock(ticking(0.0, 0.01)), "fail", "steps of 0.01 s")


def test_a_slow_clock_source_is_named(tmp_path: Path):
    (tmp_path / "source").write_text("hpet\n")
    said(doctor_system.clock(ticking(1e-6), source=tmp_path / "source"), "warn", "hpet")


def test_open_files_against_the_requests():
    said(doctor_system.open_files(1024, (65536, 65536)), "ok")
    said(doctor_system.open_files(1024, (1024, resource.RLIM_INFINITY)), "ok", "unlimited")
    said(doctor_system.open_files(1024, (1024, 2048)), "fail", "3072")
    said(doctor_system.open_files(100, (256, 65536)), "warn", "256 soft")


def test_locked_memory_matters_with_rdma_only():
    said(doctor_system.locked_memory(GIB, [], 65536), "ok", "no RDMA device")
    said(doctor_system.locked_memory(GIB, ["mlx5_0"], resource.RLIM_INFINITY), "ok", "unlimited")
    said(doctor_system.locked_memory(GIB, ["mlx5_0"], 65536), "fail", "mlx5_0", "ulimit -l unlimited")


def test_shared_memory_that_cannot_be_had_or_is_not_passed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_system.socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    said(doctor_system.shared_memory(), "fail", "SCM_RIGHTS")

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    said(doctor_system.shared_memory(), "fail", "not permitted", "memfd_create")


def test_pidfd_that_is_forbidden():
    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    said(doctor_system.pidfd(forbidden), "fail", "seccomp")


def test_ptrace_matters_for_cma_only(tmp_path: Path):
    (tmp_path / "scope").write_text("1\n")
    said(doctor_system.ptrace("shm", tmp_path / "scope"), "ok")
    said(doctor_system.ptrace("nixl/cma", tmp_path / "scope"), "fail", "ptrace_scope is 1")
    said(doctor_system.ptrace("nixl/cma", tmp_path / "none"), "ok")


def test_run_folder_with_a_path_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(deep))
    said(doctor_system.run_folder(), "fail", "XDG_RUNTIME_DIR")


# ------------------------------------------------------------ the model and its pools


def test_a_model_is_looked_at_where_it_is(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, finding = doctor_model.model(str(model))
    assert folder == model.resolve()
    said(finding, "ok", "whole")
    said(doctor_model.model(str(tmp_path / "none"))[1], "fail", "no model folder")
    said(doctor_model.model("what?")[1], "fail", "no model")
    monkeypatch.setenv("QUIESCE_CACHE", str(tmp_path / "cache"))
    folder, finding = doctor_model.model("smollm2")
    assert folder is None and not (tmp_path / "cache").exists(), "nothing is fetched"
    said(finding, "warn", "model pull")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(doctor_model.smollm2.shutil, "disk_usage", lambda path: usage)
    said(doctor_model.model("smollm2")[1], "fail", "QUIESCE_CACHE")


def test_a_damaged_model_is_found(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    said(doctor_model.model(str(folder))[1], "fail", "header")


def test_d3_the_doctor_names_a_pool_that_is_smaller_than_the_context(model: Path):
    def pool(context: int | None, tokens: int, page: int = 16) -> Finding:
        asked = SizeOptions(context_length=context, max_total_tokens=tokens, page_size=page)
        return by_name(doctor_model.sizes(model, asked, EngineOptions(), 2))["pool"]

    said(pool(None, 4096), "ok", "8 fit")
    said(pool(None, 256), "fail", "--max-total-tokens to at least 512", "--context-length to at most 256")
    said(pool(None, 520, page=100), "fail", "at least 600", "at most 500")
    said(pool(1024, 4096), "fail", "own limit is 512")
    said(pool(None, 600), "warn", "1024")
    said(pool(256, 600), "ok")


@pytest.mark.parametrize(
    ("own", "asked", "tokens"),
    [
        (8192, SizeOptions(), 20_480),
        (32_768, SizeOptions(), 32_768),
        (30_000, SizeOptions(page_size=64), 30_016),
        (131_072, SizeOptions(), 65_536),  # less than the context, so it is refused, by name
        (131_072, SizeOptions(context_length=40_000), 40_000),
        (131_072, SizeOptions(max_total_tokens=131_072), 131_072),
        (None, SizeOptions(), 20_480),
    ],
)
def test_the_pool_is_as_large_as_the_context_by_default(own: int | None, asked: SizeOptions, tokens: int):
    assert asked.pool_tokens(own) == tokens


def test_memory_of_all_pools_and_weights(model: Path):
    config = doctor_model.read_config(model)
    asked, engine = SizeOptions(), EngineOptions()

    def memory(free: int, most: int, engine: EngineOptions = engine) -> Finding:
        return doctor_model.memory(config, model, asked, engine, 2, free, most)

    said(memory(4 * GIB, 8 * GIB), "ok")
    said(memory(1 << 20, 8 * GIB), "warn", "--max-total-tokens")
    said(memory(1 << 20, 2 << 20), "fail", "more than there is")
    cuda = replace(engine, device="cuda")
    said(memory(4 * GIB, 8 * GIB, cuda), "ok", "on cuda, the pools mirrored here")
    said(memory(1 << 20, 2 << 20, cuda), "fail", "more than there is")


def test_layout_of_a_model_that_the_engine_does_not_run(model: Path, tmp_path: Path):
    said(by_name(doctor_model.sizes(model, SizeOptions(), EngineOptions(), 2))["layout"], "ok", "page-major")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 128, "model_type": "mistral"}))
    found = by_name(doctor_model.sizes(tmp_path, SizeOptions(), EngineOptions(), 2))
    said(found["layout"], "fail")
    assert list(found) == ["layout"]


# ------------------------------------------------------------ the command


def asked(model: Path, **changes: Any) -> doctor.Asked:
    whole = doctor.Asked(
        str(model),
        ClusterOptions(colocated=True),
        HttpOptions(),
        SizeOptions(),
        EngineOptions(),
        HandOffOptions(),
        RoutingOptions(),
        ProcessOptions(),
    )
    return replace(whole, **changes)


def test_options_that_serve_would_refuse(model: Path):
    said(doctor.options(asked(model), model), "ok")
    said(doctor.options(asked(model, hand_off=HandOffOptions(hold_timeout=-1)), model), "fail", "--hold-timeout")
    said(doctor.options(asked(model, cluster=ClusterOptions(prefill=0)), model), "fail", "--prefill")
    said(doctor.options(asked(model, http=HttpOptions(api_keys=Path("/none"))), model), "fail", "--api-keys")


def test_a_check_that_raises_is_a_finding_and_stops_no_other():
    def broken() -> Finding:
        raise RuntimeError("no such file")

    assert [finding.status for finding in guarded("x", broken)] == ["fail"]
    assert guarded("x", broken)[0].found.endswith("RuntimeError: no such file")


def test_exit_codes_count_failures_only():
    assert exit_code([ok("a", ""), warn("b", "", "x")]) == 0
    assert exit_code([ok("a", ""), fail("b", "", "x")]) == 1


def test_the_command_says_in_json_what_to_change(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    small = ["--colocated", "--max-total-tokens", "256", "--json"]
    assert cli.main(["doctor", str(model), *small]) == 1
    report = json.loads(capsys.readouterr().out)
    pool = next(check for check in report["checks"] if check["name"] == "pool")
    assert not report["ok"] and pool["status"] == "fail" and "--context-length" in pool["fix"]
    assert report["counts"]["fail"] == 1, report
    assert cli.main(["doctor", str(model), "--colocated"]) == 0
    assert "to mend" in capsys.readouterr().out


def test_the_bundle_holds_the_cluster_and_no_secret(tmp_path: Path):
    found = [warn("reach router", "http://me:hunter2@host/ said Bearer sk-123", "x")]
    answers = doctor_cluster.Answers(
        {"/debug/ledger": {"d": {"pages": {"retained": 0}}}, "/metrics": "quiesce:x 1\n"}
    )
    file = tmp_path / "doctor.tar.gz"
    bundle(file, found, answers)
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        texts = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
        assert all(abs(entry.mtime - time.time()) < 600 for entry in archive)
    assert sorted(texts) == [f"quiesce-doctor/{name}" for name in ("ledger.json", "metrics", "report.json")]
    whole = "".join(texts.values())
    assert "hunter2" not in whole and "sk-123" not in whole and '"retained": 0' in whole
