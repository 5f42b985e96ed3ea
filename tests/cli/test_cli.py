from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quiesce import cli
from quiesce.ops import doctor
from quiesce.ops import serve as serve_module
from quiesce.ops.doctor import Asked
from quiesce.ops.run_dir import RunDir
from quiesce.ops.serve import Serve, make_plans
from quiesce.options import (
    SUPERVISED,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
    arguments,
)
from quiesce.options_router import RouterWiring, RoutingOptions, SilenceOptions, router_settings
from quiesce.options_worker import WorkerWiring, worker_settings
from quiesce.roles import decode as decode_role
from quiesce.roles.settings import RouterSettings, SettingsError, WorkerSettings
from tiny_model import make_tiny_llama

KEY = "k" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", context=512)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("QUIESCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Serve]:
    """What `serve` would have run."""
    found: list[Serve] = []

    def remember(what: Serve) -> int:
        found.append(what)
        return 0

    monkeypatch.setattr(serve_module, "serve", remember)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("quiesce: ")
    return text


def test_defaults_are_one_prefill_and_one_decode_on_port_8000(model: Path, asked: list[Serve]) -> None:
    assert cli.main(["serve", str(model)]) == 0
    (serve,) = asked
    assert serve.worker_names == {"prefill-0": "prefill", "decode-0": "decode"}
    assert (serve.http.host, serve.http.port, serve.name) == ("127.0.0.1", 8000, "tiny")
    assert serve.sizes == SizeOptions()


def test_every_option_of_serve_reaches_its_place(model: Path, asked: list[Serve]) -> None:
    words = (
        "--prefill 2 --decode 3 --served-model-name chat --host 0.0.0.0 --port 9 --context-length 100 --page-size 8 "
        "--max-total-tokens 800 --chunked-prefill-size 64 --max-running-requests 4 --dtype float32 --device cpu "
        "--deterministic --hold-timeout 3 --on-hold-expiry release --max-retained 0.5 --drain-timeout 1 --threads 2 "
        "--log-level debug --transfer shm --reserve late --schedule-conservativeness 0.5 --direction pull "
        "--allow-unproven"
    )
    assert cli.main(["serve", str(model), *words.split()]) == 0
    (serve,) = asked
    assert list(serve.worker_names) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert (serve.name, serve.http.host, serve.http.port) == ("chat", "0.0.0.0", 9)
    assert serve.sizes == SizeOptions(100, 8, 800, 64, 4, schedule_conservativeness=0.5)
    assert serve.engine == EngineOptions("cpu", "float32", True, 2)
    assert serve.hand_off == HandOffOptions("shm", 3.0, "release", 0.5, "late", direction="pull", allow_unproven=True)
    assert serve.process == ProcessOptions(1.0, "debug")


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    model: Path, asked: list[Serve], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "quiesce.toml").write_text("[serve]\nport = 1\nthreads = 5\npage-size = 4\n")
    monkeypatch.setenv("QUIESCE_PORT", "2")
    monkeypatch.setenv("QUIESCE_THREADS", "6")
    monkeypatch.setenv("QUIESCE_CACHE", "/somewhere")
    assert cli.main(["serve", str(model), "--port", "3"]) == 0
    (serve,) = asked
    assert (serve.http.port, serve.engine.threads, serve.sizes.page_size) == (3, 6, 4)


def test_a_named_file_is_read_and_must_exist(
    model: Path, asked: list[Serve], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text("[serve]\nport = 77\n")
    assert cli.main(["serve", str(model), "--config", "other.toml"]) == 0
    assert asked[0].http.port == 77
    assert "There is no settings file absent.toml" in refused(capsys, "serve", str(model), "--config", "absent.toml")


def test_an_unknown_setting_in_the_file_is_refused_by_name(
    model: Path, asked: list[Serve], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "quiesce.toml").write_text("[serve]\nprot = 1\n")
    assert "prot" in refused(capsys, "serve", str(model))
    (tmp_path / "quiesce.toml").write_text("[serve\n")
    assert "quiesce.toml" in refused(capsys, "serve", str(model))
    assert asked == []


def test_a_child_of_serve_reads_neither_environment_nor_file(
    model: Path, asked: list[Serve], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "quiesce.toml").write_text("[serve]\nport = 1\n")
    monkeypatch.setenv("QUIESCE_THREADS", "6")
    monkeypatch.setenv(SUPERVISED, "1")
    assert cli.main(["serve", str(model)]) == 0
    assert (asked[0].http.port, asked[0].engine.threads) == (8000, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-total-tokens", "256"], "pool holds 256 tokens but the context length is 512"),
        (["--context-length", "513"], "--context-length is 513 but the model's own limit is 512"),
        (["--context-length", "300", "--max-total-tokens", "256"], "lower --context-length to at most 256"),
        (["--page-size", "0"], "--page-size must be between 1 and 1024, not 0"),
        (["--prefill", "0"], "--prefill must be between 1 and 64, not 0"),
        (["--colocated", "--decode", "2"], "leave out --prefill and --decode"),
        (["--port", "70000"], "--port must be between 0 and 65535, not 70000"),
        (["--max-total-tokens", "2000000000", "--prefill", "64"], "lower --max-total-tokens"),
        (["--hold-timeout", "-1"], "--hold-timeout"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int4"], "int4"),
        (["--nonsense"], "--nonsense"),
        (["--port", "http"], "http"),
    ],
)
def test_d3_impossible_settings_are_refused_before_anything_starts(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(serve_module, "RunDir", start)
    assert says in refused(capsys, "serve", str(model), *words)


def test_d3_a_lowered_limit_makes_a_small_pool_acceptable(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(serve_module, "RunDir", start)
    with pytest.raises(Started):
        cli.main(["serve", str(model), "--max-total-tokens", "256", "--context-length", "256", "--port", "0"])


def test_a_port_in_use_and_an_unknown_model_are_refused_in_words(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Cannot listen on 127.0.0.1 port {port}" in refused(capsys, "serve", str(model), f"--port={port}")
    assert "There is no model" in refused(capsys, "serve", "no-such-model")
    assert "/nowhere/at/all" in refused(capsys, "serve", "/nowhere/at/all")


def test_what_serve_passes_to_a_worker_comes_out_as_the_same_settings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "router.pub").write_text(KEY)
    found: list[WorkerSettings] = []

    def run(settings: WorkerSettings) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(decode_role, "run", run)
    sizes, engine = SizeOptions(128, 8, 640, 24, 3, 9, 0.25), EngineOptions("cpu", "float32", True, 2)
    hand_off, process = (
        HandOffOptions("shm", 7.5, "release", 0.125, "late", direction="pull", allow_unproven=True),
        ProcessOptions(2.5, "warning"),
    )
    words = ["--registry=ipc:///r", "--registry-key=router.pub", "--keys=k", "--run-dir=d", "--name=decode-4"]
    words += ["--epoch=00000000000000ff", *arguments(sizes, engine, hand_off, process)]
    assert cli.main(["decode", str(model), *words]) == 0
    assert found == [
        WorkerSettings(
            role="decode",
            name="decode-4",
            model=model,
            served_model_name="tiny",
            registry="ipc:///r",
            registry_public_key=KEY,
            keys=Path("k"),
            run_dir=Path("d"),
            epoch=255,
            dtype="float32",
            deterministic=True,
            threads=2,
            context_length=128,
            page_size=8,
            max_total_tokens=640,
            chunked_prefill_size=24,
            max_running=3,
            max_queued=9,
            schedule_conservativeness=0.25,
            reserve="late",
            direction="pull",
            allow_unproven=True,
            hold_timeout=7.5,
            max_retained=0.125,
            on_hold_expiry="release",
            drain_timeout=2.5,
            log_level="warning",
        )
    ]


def test_serve_gives_the_hold_timeout_to_router_and_workers_alike(model: Path, asked: list[Serve]) -> None:
    assert cli.main(["serve", str(model), "--hold-timeout", "7.5"]) == 0
    run_dir = RunDir()
    try:
        for plan in make_plans(asked[0], run_dir):
            assert "--hold-timeout=7.5" in plan.command(1), plan.name
    finally:
        run_dir.remove()


def test_every_option_is_passed_on_whatever_its_value() -> None:
    for group in (
        HttpOptions(
            api_keys=Path("keys.toml"),
            http_port="decode-0=1",
            http_hosts="h",
            tls_cert=Path("c"),
            tls_key=Path("k"),
            tls_client_ca=Path("a"),
        ),
        SizeOptions(7, max_total_tokens=512),
        EngineOptions(),
        HandOffOptions(transfer_tls_cert=Path("c"), transfer_tls_key=Path("k"), transfer_tls_ca=Path("a")),
        SilenceOptions(),
        RoutingOptions(),
        ProcessOptions(),
    ):
        assert len(arguments(group)) == len(fields(group))


def test_doctor_looks_at_what_serve_would_be_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of [serve], and of [doctor] where both say something."""
    found: list[Asked] = []

    def remember(asked: Asked, **_: object) -> int:
        found.append(asked)
        return 0

    monkeypatch.setattr(doctor, "run", remember)
    file = tmp_path / "quiesce.toml"
    file.write_text(
        '[serve]\nport = 7\nmax-total-tokens = 4096\n[doctor]\nmax-total-tokens = 512\nurl = "http://h"\n'
    )
    monkeypatch.setenv("QUIESCE_THREADS", "6")
    assert cli.main(["doctor", "--page-size", "8"]) == 0
    asked = found[0]
    assert (asked.http.port, asked.sizes, asked.url) == (
        7,
        SizeOptions(page_size=8, max_total_tokens=512),
        "http://h",
    )
    assert asked.engine.threads == 6
    file.write_text("[serve]\nprot = 1\n")
    assert "prot" in refused(capsys, "doctor")


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    """As `quiesce ... | head` does."""
    script = "import sys; from quiesce.cli import main; sys.exit(main(['version']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--host 0.0.0.0", "every prompt would travel as it is: give --keys a folder that `quiesce keys` made"),
        ("--host ::", "--allow-open-http takes that risk"),
        ("--host example.org", "--host example.org lets other machines reach this server"),
        ("--host 10.0.0.1 --tls-cert c --tls-key k", "everybody may ask: give --tls-client-ca"),
        ("--host 10.0.0.1 --api-keys a", "every prompt would travel as it is"),
        ("--tls-cert c", "--tls-cert and --tls-key need each other"),
        ("--tls-client-ca c", "--tls-client-ca needs --tls-cert"),
        ("--tls-cert c --tls-key k", "TLS with c, k: "),
        ("--transfer-bind 10.0.0.1", "--transfer-bind 10.0.0.1 lets other hosts reach this worker's pages"),
        ("--transfer-bind 10.0.0.1 --transfer tcp", "--allow-open-transfer takes that risk"),
        ("--transfer-bind 10.0.0.1 --transfer nixl/tcp", "nixl/tcp encrypts nothing: use --transfer tcp with keys"),
        (
            "--transfer-bind 10.0.0.1 --transfer mooncake --transfer-tls-cert c --transfer-tls-key k "
            "--transfer-tls-ca a",
            "mooncake encrypts nothing",
        ),
    ],
)
def test_what_others_could_reach_unprotected_is_refused_before_anything_starts(
    model: Path, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    said = refused(capsys, "serve", str(model), *words.split())
    assert says in said and said.count("\n") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"host": "::1"},
        {"host": "127.0.0.2"},
        {"host": "0.0.0.0", "allow_open_http": True},
        {"host": "10.0.0.1", "tls_cert": Path("c"), "tls_key": Path("k"), "tls_client_ca": Path("a")},
        {"host": "10.0.0.1", "tls_cert": Path("c"), "tls_key": Path("k"), "api_keys": Path("a")},
    ],
)
def test_what_is_protected_or_was_asked_for_may_listen(fields: dict[str, Any]) -> None:
    assert RouterSettings(model=Path("m"), served_model_name="m", keys=Path("k"), registry="", **fields)


@pytest.mark.parametrize(
    ("fields", "refused_for"),
    [
        ({"transfer_bind": "127.0.0.2"}, ""),
        ({"transfer": "shm", "transfer_bind": "10.0.0.1"}, ""),
        ({"transfer": "nixl", "transfer_bind": "10.0.0.1", "allow_open_transfer": True}, ""),
        (
            {"transfer": "tcp", "transfer_bind": "10.0.0.1", "transfer_tls_cert": 1, "transfer_tls_key": 1},
            "need each",
        ),
        ({"bind": "tcp://10.0.0.1:*"}, ""),
        ({"bind": "tcp://*:29501"}, "--bind must name the address"),
        ({"bind": "tcp://0.0.0.0:*"}, "--bind must name the address"),
    ],
)
def test_a_worker_is_reached_by_others_only_as_it_should_be(fields: dict[str, Any], refused_for: str) -> None:
    plain: dict[str, Any] = {"role": "decode", "name": "d", "model": Path("m"), "served_model_name": "m"}
    plain |= {"registry": "", "registry_public_key": KEY, "keys": Path("k"), "run_dir": Path("r")}
    if refused_for:
        with pytest.raises(SettingsError, match=refused_for):
            WorkerSettings(**plain, **fields)
    else:
        assert WorkerSettings(**plain, **fields)


def test_keys_with_certificates_give_them_to_http_and_tcp_unless_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    router = RouterWiring("tcp://127.0.0.1:*", tmp_path)
    worker = WorkerWiring("tcp://127.0.0.1:1", tmp_path, tmp_path, "decode-0")

    def http(**fields: Any) -> Path | None:
        options = HttpOptions(**fields)
        made = router_settings(tmp_path, "m", router, options, SilenceOptions(), RoutingOptions(), ProcessOptions())
        return made.tls.cert if made.tls else None

    def tcp(role: Any, **fields: Any) -> Path | None:
        groups = SizeOptions(), EngineOptions(), HandOffOptions(**fields), ProcessOptions()
        return worker_settings(role, tmp_path, "m", KEY, worker, *groups).transfer_tls_cert

    assert http() == tcp("decode") == tmp_path / "tls" / "host.pem"
    assert http(tls_cert=Path("c"), tls_key=Path("k")) == Path("c")
    named = {"transfer_tls_cert": Path("c"), "transfer_tls_key": Path("k"), "transfer_tls_ca": Path("a")}
    assert tcp("prefill", **named) == Path("c")
    assert tcp("colocated") is None


def test_a_bad_epoch_or_name_is_refused(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "router.pub").write_text(KEY)
    words = ["decode", str(model), "--registry=ipc:///r", "--registry-key=router.pub", "--keys=k", "--run-dir=d"]
    assert "--epoch must be 64 bits" in refused(capsys, *words, "--name=a", "--epoch=xyz")
    assert "--name must be" in refused(capsys, *words, "--name=../a")
    assert "--registry" in refused(capsys, "decode", str(model), "--name=a")


def test_help_is_complete_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from quiesce.cli import main; main(['serve', '--help']); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy imports'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for group in ("Cluster", "HTTP", "Sizes", "Engine", "Hand-off", "Process"):
        assert group in done.stdout
    for group_type in (HttpOptions, SizeOptions, EngineOptions, HandOffOptions, ProcessOptions):
        for option in fields(group_type):
            assert "--" + option.name.replace("_", "-") in done.stdout
    assert "quiesce serve --port 9000" in done.stdout


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == short
    assert short.strip()[0].isdigit()


def test_models_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIESCE_CACHE", str(tmp_path / "cache"))
    assert cli.main(["model", "list"]) == 0
    assert "smollm2" in capsys.readouterr().out
