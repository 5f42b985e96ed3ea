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

import httpx2
import pytest

from quiesce import cli
from quiesce.channel import KeyPair, KeyRing
from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.engine.native import library
from quiesce.ops import doctor, doctor_ack, doctor_cluster, doctor_keys, doctor_model, doctor_system, doctor_transfer
from quiesce.ops.doctor_finding import Finding, fail, guarded, ok, warn
from quiesce.ops.doctor_report import as_json, bundle, exit_code
from quiesce.options import (
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
)
from quiesce.options_router import RoutingOptions
from quiesce.transfer.interface import Peer, Post
from quiesce.transfer.null import NullTransport
from quiesce.transfer.tcp import TcpTransport
from tiny_model import make_tiny_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", context=512)


def said(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    assert status == "ok" or finding.fix, "what is not ok says what to change"
    for word in words:
        assert word in finding.found + finding.fix, finding


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


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


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


def test_memory_of_all_pools_and_weights(model: Path):
    config = doctor_model.read_config(model)
    asked, engine = SizeOptions(), EngineOptions()

    def memory(free: int, most: int, engine: EngineOptions = engine) -> Finding:
        return doctor_model.memory(config, model, asked, engine, 2, free, most)

    said(memory(4 * GIB, 8 * GIB), "ok")
    said(memory(1 << 20, 8 * GIB), "warn", "--max-total-tokens")
    said(memory(1 << 20, 2 << 20), "fail", "more than there is")
    said(memory(1 << 20, 2 << 20, replace(engine, device="cuda")), "ok", "on cuda")


def test_layout_of_a_model_that_the_engine_does_not_run(model: Path, tmp_path: Path):
    said(by_name(doctor_model.sizes(model, SizeOptions(), EngineOptions(), 2))["layout"], "ok", "page-major")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 128, "model_type": "mistral"}))
    found = by_name(doctor_model.sizes(tmp_path, SizeOptions(), EngineOptions(), 2))
    said(found["layout"], "fail")
    assert list(found) == ["layout"]


# ------------------------------------------------------------ transfer engines


def test_an_abort_on_scratch_pages_brings_drained_back(tmp_path: Path):
    for make in (NullTransport, TcpTransport):
        told = doctor_ack.abort(make)
        assert told.drained and told.answers[-1] == "DRAINED", told
        said(doctor_transfer.ack("x", told, wanted=True), "ok", "DRAINED")


class Silent(NullTransport):
    """Its posts never end."""

    def poll(self) -> list[tuple[Post, Outcome]]:
        super().poll()
        return []


class Doubtful(NullTransport):
    """What it posted may still land, and it cannot tell when no more does."""

    def poll(self) -> list[tuple[Post, Outcome]]:
        return [(post, Outcome.UNKNOWN) for post, _ in super().poll()]

    def drain(self, peer: Peer) -> bool:
        return False


class Raising(NullTransport):
    def write(self, peer: Peer, src_pages: Any, dst_pages: Any, grant: Grant) -> Post:
        raise RuntimeError("the engine's queue is broken")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Silent, ("no proof within", "BUSY")),
        (Doubtful, ("no proof within", "TAINTED")),
        (Raising, ("queue is broken", "no answer")),
    ],
)
def test_an_ack_path_that_brings_no_proof_fails(kind: type[NullTransport], words: tuple[str, ...]):
    told = doctor_ack.abort(kind, seconds=0.3)
    assert not told.drained and told.closed_by == ""
    said(doctor_transfer.ack("x", told, wanted=True), "fail", *words)
    said(doctor_transfer.ack("x", told, wanted=False), "warn")


def lane(label: str, hand_off: HandOffOptions, **changes: Any) -> dict[str, Finding]:
    words = {**doctor_transfer.try_lane("tcp", Path(), HandOffOptions()), **changes}
    return by_name(doctor_transfer.findings(label, words, hand_off))


def test_a_lane_shows_what_it_can_prove_and_is_held_to_what_is_asked():
    auto, asked = HandOffOptions(), HandOffOptions(transfer="tcp")
    found = lane("tcp", asked)
    said(found["transfer tcp"], "ok", "push and pull", "drain per_post", "fence page (us)")
    said(found["ack path tcp"], "ok", "DRAINED")
    said(lane("tcp", asked, wrong=["reads bring other bytes"])["transfer tcp"], "fail", "other bytes")
    said(lane("tcp", auto, wrong=["reads bring other bytes"])["transfer tcp"], "warn", "other bytes")
    caps = lane_caps()
    said(lane("tcp", asked, caps=caps | {"drain": "none"})["transfer tcp"], "fail", "--allow-unproven")
    said(lane("tcp", asked, caps=caps | {"measured": False})["transfer tcp"], "warn", "conformance")
    pull = replace(asked, direction="pull")
    words = doctor_transfer.try_lane("tcp", Path(), pull)
    assert "abort" not in words
    said(by_name(doctor_transfer.findings("tcp", words, pull))["ack path tcp"], "warn", "not tried", "conformance")
    said(lane("tcp", pull, caps=caps | {"pull": False})["transfer tcp"], "fail", "--direction")


def lane_caps() -> dict[str, Any]:
    caps: dict[str, Any] = doctor_transfer.try_lane("tcp", Path(), HandOffOptions(direction="pull"))["caps"]
    return caps


def test_a_lane_that_is_not_installed_or_cannot_be_made():
    asked = HandOffOptions(transfer="nixl/tcp")
    missing = {"missing": "NIXL is not installed: pip install 'quiesce[nixl]'"}
    said(next(doctor_transfer.findings("nixl/tcp", missing, asked)), "fail", "pip install")
    said(next(doctor_transfer.findings("nixl/tcp", missing, HandOffOptions())), "ok", "not used", "pip install")
    error = doctor_transfer.try_lane("shm/x", Path(), asked)
    said(next(doctor_transfer.findings("shm/x", error, replace(asked, transfer="shm/x"))), "fail", "no lanes")


def test_the_transfer_needs_one_engine_that_has_passed():
    passed = [ok("transfer tcp", ""), ok("ack path tcp", "")]
    broken = [*passed, warn("transfer shm", "", "x")]
    said(doctor_transfer.chosen(broken, HandOffOptions()), "ok", "would use tcp")
    said(doctor_transfer.chosen(broken, HandOffOptions(transfer="shm")), "fail", "shm")
    said(doctor_transfer.chosen([passed[0], warn("ack path tcp", "", "x")], HandOffOptions()), "fail", "auto")


def test_the_lane_that_is_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_transfer.registry, "rdma_devices", list)
    found = doctor_transfer.labels("nixl/cma")
    assert found[0] == "nixl/cma" and found.count("nixl/cma") == 1 and "null" not in found
    assert "nixl/rc" not in found and {"shm", "tcp", "nixl/tcp", "mooncake/tcp", "mori"} <= set(found)
    monkeypatch.setattr(doctor_transfer.registry, "rdma_devices", lambda: ["mlx5_0"])
    assert {"nixl/rc", "mooncake/rdma"} <= set(doctor_transfer.labels("auto"))


def test_an_engine_that_kills_its_process_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_transfer.sys, "executable", "/bin/false")
    assert "ended with 1" in doctor_transfer.in_process_of_its_own("tcp", HandOffOptions())["error"]
    monkeypatch.setattr(doctor_transfer, "PATIENCE", 0.0)
    monkeypatch.setattr(doctor_transfer.sys, "executable", "/bin/cat")
    assert "end within" in doctor_transfer.in_process_of_its_own("/dev/zero", HandOffOptions())["error"]


@pytest.mark.slow
def test_shm_in_a_process_of_its_own_gives_its_proof():
    asked = HandOffOptions(transfer="shm")
    found = by_name(doctor_transfer.findings("shm", doctor_transfer.in_process_of_its_own("shm", asked), asked))
    said(found["transfer shm"], "ok", "drain per_post")
    said(found["ack path shm"], "ok", "DRAINED")


# ------------------------------------------------------------ keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    ring = KeyRing(folder / "ring")
    for name in ("router", "decode-0"):
        pair = KeyPair.generate()
        pair.save(folder / f"{name}.key")
        ring.add(name, pair.public)
    ring.add("prefill-0", KeyPair.generate().public)
    return folder


def test_keys_that_are_right(keys: Path):
    found = by_name(doctor_keys.keys(keys))
    assert list(found) == ["key modes", "key pairs", "key ring"]
    for finding in found.values():
        said(finding, "ok")
    secret = KeyPair.load(keys / "router.key").secret
    assert secret not in json.dumps(as_json(list(found.values())))


def test_keys_that_others_can_read_or_replace(keys: Path):
    (keys / "router.key").chmod(0o644)
    said(by_name(doctor_keys.keys(keys))["key modes"], "fail", "router.key", "chmod 600")
    (keys / "router.key").chmod(0o600)
    (keys / "ring").chmod(0o777)
    said(by_name(doctor_keys.keys(keys))["key modes"], "fail", "ring", "chmod go-w")


def test_pairs_that_are_damaged_or_missing(keys: Path, tmp_path: Path):
    (keys / "decode-0.key").write_text("x" * 40 + "\n")
    said(by_name(doctor_keys.keys(keys))["key pairs"], "fail", "decode-0.key")
    said(by_name(doctor_keys.keys(tmp_path / "none"))["keys"], "fail", "no folder")
    (tmp_path / "empty").mkdir()
    said(by_name(doctor_keys.keys(tmp_path / "empty"))["key pairs"], "fail", "no NAME.key")
    said(by_name(doctor_keys.keys(tmp_path / "empty"))["key ring"], "fail", "everybody is refused")


def test_rings_that_do_not_fit_the_pairs(keys: Path):
    def ring() -> Finding:
        return by_name(doctor_keys.keys(keys))["key ring"]

    kept = (keys / "ring/decode-0.pub").read_text()
    (keys / "ring/decode-0.pub").write_text(KeyPair.generate().public)
    said(ring(), "fail", "older pair", "decode-0")
    (keys / "ring/decode-0.pub").write_text(kept)
    (keys / "ring/other.pub").write_text(kept)
    said(ring(), "fail", "several names", "other")
    (keys / "ring/other.pub").write_text("no key")
    said(ring(), "fail", "no public keys: other")
    (keys / "ring/other.pub").unlink()
    (keys / "ring/decode-0.pub").unlink()
    said(ring(), "warn", "not in the ring", "decode-0")


# ------------------------------------------------------------ a running cluster

WORKER = {
    "name": "decode-0",
    "trouble": None,
    "cautions": [],
    "heartbeat_seconds_ago": 0.2,
    "context_length": 512,
    "pool_tokens": 4096,
}
LEDGER = {"pages": {"retained": 0, "held": 0}, "unsound": 0}


def cluster(**changes: Any) -> dict[str, Finding]:
    """The findings about a cluster that is right but for `changes`: of /health, or whole pages by name."""
    worker = WORKER | changes.pop("worker", {})
    status = changes.pop("status", 200)
    pages: dict[str, Any] = {
        "probes": {"decode-0": 0.05},
        "models": {"data": [{"id": "tiny", "max_model_len": 512}]},
        "ledger": {"decode-0": LEDGER},
        "metrics": "# HELP x\nquiesce:requests_started_total 7.0\n",
    }
    pages |= {name: changes.pop(name) for name in list(changes) if name in pages}
    health = {"status": "ok", "missing": [], "mismatches": [], "context_limit": 512, "workers": [worker]} | changes

    def answer(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path == "/health":
            with_probes = health | {"probes": pages["probes"]} if request.url.query else health
            return httpx2.Response(status, json=with_probes)
        if path == "/metrics":
            return httpx2.Response(200, text=pages["metrics"])
        page = pages["models" if path == "/v1/models" else "ledger"]
        return httpx2.Response(page if isinstance(page, int) else 200, json=page)

    return by_name(doctor_cluster.findings(doctor_cluster.ask("http://c", "", httpx2.MockTransport(answer))))


def test_a_cluster_that_is_right():
    found = cluster()
    for finding in found.values():
        said(finding, "ok")
    assert len(found) == 9


@pytest.mark.parametrize(
    ("changes", "name", "status", "word"),
    [
        ({"status": 503, "missing": ["no decode worker"]}, "cluster health", "fail", "no decode worker"),
        ({"status": 503, "nothing_moved_for": 12.5}, "cluster health", "fail", "12.5 s"),
        ({"mismatches": ["page_size: 16 != 32"]}, "cluster layouts", "fail", "page_size"),
        ({"worker": {"trouble": "its engine stands still"}}, "workers to router", "fail", "stands still"),
        ({"worker": {"heartbeat_seconds_ago": 9.0}}, "workers to router", "warn", "decode-0"),
        ({"worker": {"cautions": ["3 pages are retained"]}}, "cautions", "warn", "3 pages"),
        ({"probes": {"decode-0": "timed out"}}, "router to workers", "fail", "timed out"),
        ({"probes": {}}, "router to workers", "fail", "no worker was probed"),
        ({"worker": {"pool_tokens": 256}}, "cluster limits", "fail", "256"),
        ({"models": {"data": [{"max_model_len": None}]}}, "cluster limits", "fail", "nothing is usable"),
        ({"models": {"data": [{"max_model_len": 99}]}}, "cluster limits", "warn", "99"),
        ({"models": 401}, "cluster limits", "warn", "--key"),
        ({"ledger": 403}, "ledgers", "warn", "admin"),
        ({"ledger": {"decode-0": {"error": "no answer"}}}, "ledgers", "fail", "decode-0"),
        ({"ledger": {"decode-0": LEDGER | {"unsound": 2}}}, "proofs", "fail", "decode-0: 2"),
        ({"ledger": {"d": LEDGER | {"pages": {"retained": 4, "held": 0}}}}, "retained pages", "fail", "d 4"),
        ({"metrics": "quiesce:num_running_reqs -1.0\n"}, "metrics", "fail", "negative"),
        ({"metrics": "other 1\n"}, "metrics", "fail", "no sample"),
    ],
)
def test_a_cluster_with_one_fault(changes: dict[str, Any], name: str, status: str, word: str):
    said(cluster(**changes)[name], status, word)


def test_workers_of_different_sizes_are_named():
    several = {"workers": [WORKER, WORKER | {"name": "decode-1", "context_length": 1024}]}
    said(cluster(**several)["cluster limits"], "warn", "512 to 1024")


def test_nobody_and_somebody_else_at_the_address():
    def nobody(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("Connection refused")

    def other(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"hello": "world"})

    def endless(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=b" " * (doctor_cluster.LONGEST + 1))

    for url in ("localhost:8000", "http://[", ""):
        found = list(doctor_cluster.findings(doctor_cluster.ask(url, "")))
        said(found[0], "fail", "--url")
    for kind, word in ((nobody, "refused"), (other, "not a router"), (endless, "longer than")):
        answers = doctor_cluster.ask("http://c", "", httpx2.MockTransport(kind))
        found = list(doctor_cluster.findings(answers))
        assert len(found) == 1
        said(found[0], "fail", word)


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
    answers = doctor_cluster.Answers({"/debug/ledger": {"d": LEDGER}, "/metrics": "quiesce:x 1\n"})
    file = tmp_path / "doctor.tar.gz"
    bundle(file, found, answers)
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        texts = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
        assert all(abs(entry.mtime - time.time()) < 600 for entry in archive)
    assert sorted(texts) == [f"quiesce-doctor/{name}" for name in ("ledger.json", "metrics", "report.json")]
    whole = "".join(texts.values())
    assert "hunter2" not in whole and "sk-123" not in whole and '"retained": 0' in whole
