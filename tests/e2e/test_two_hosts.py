"""Two hosts, as far as one machine can be two: keys of `quiesce keys`, an address each, TLS on every way between."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from certificates import Hosts, make_hosts
from e2e.conftest import short_folder
from e2e.product import until
from ports import free_port
from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.idle import not_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

API_KEY, ADMIN_KEY = "sk-of-a-tenant-6f1c2b", "operators-key-93ad55f0"
PROMPT = list(range(10, 150))
TEXT = "a prompt that nobody else may read"
CONTEXTS = {"prefill-0": 512, "decode-0": 384}
SIZES = ("--max-total-tokens=4096", "--chunked-prefill-size=64", "--dtype=float32")
PORTS = ("router", "prefill-0", "decode-0", "admin")


@dataclass
class TwoHosts:
    hosts: Hosts
    urls: dict[str, str]
    logs: dict[str, Path]
    processes: dict[str, subprocess.Popen[bytes]]

    def client(self, host: Path | None, port: str = "router", key: str = API_KEY) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        context = self.hosts.client(host)
        return httpx.Client(base_url=self.urls[port], verify=context, headers=headers, timeout=60)

    def get(self, path: str, port: str = "router", key: str = API_KEY) -> httpx.Response:
        with self.client(self.hosts.beta, port, key) as client:
            return client.get(path)

    def counter(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"quiesce:router_{name}_total ")).split()[1])


@pytest.fixture(scope="module")
def two(tiny: Path) -> Iterator[TwoHosts]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(short_folder()))
        hosts = make_hosts(folder)
        (folder / "api-keys.toml").write_text(f'[[key]]\ntenant = "a"\nadmin = true\nkey = "{API_KEY}"\n')
        (folder / "admin.key").write_text(ADMIN_KEY)
        for secret in ("api-keys.toml", "admin.key"):
            (folder / secret).chmod(0o600)
        ports = {name: free_port() for name in (*PORTS, "registry")}
        registry = f"--registry=tcp://127.0.0.1:{ports['registry']}"
        router = [f"--keys={hosts.alpha}", registry, f"--port={ports['router']}"]
        router += [f"--http-port=prefill-0={ports['prefill-0']},decode-0={ports['decode-0']}"]
        router += [f"--api-keys={folder / 'api-keys.toml'}"]
        router += [f"--admin=127.0.0.1:{ports['admin']}", f"--admin-key={folder / 'admin.key'}"]
        urls = {name: f"https://127.0.0.1:{ports[name]}" for name in PORTS}
        made = TwoHosts(hosts, urls, {}, {})
        _start(stack, made, folder, tiny, "router", router)
        for name, keys, address in (("prefill-0", hosts.alpha, "127.0.0.1"), ("decode-0", hosts.beta, "127.0.0.2")):
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="q-", dir="/tmp")))
            words = [f"--keys={keys}", registry, f"--run-dir={run}", f"--name={name}", f"--bind=tcp://{address}:*"]
            words += ["--transfer=tcp", f"--transfer-bind={address}", "--deterministic", *SIZES]
            words.append(f"--context-length={CONTEXTS[name]}")
            _start(stack, made, folder, tiny, name, words)
        until(lambda: _ready(made), 170, f"both workers to serve; logs in {folder}")
        yield made


def _start(stack: Any, made: TwoHosts, folder: Path, model: Path, name: str, words: list[str]) -> None:
    made.logs[name] = folder / f"{name}.log"
    log = stack.enter_context(made.logs[name].open("wb"))
    role = name.partition("-")[0]
    command = [sys.executable, "-m", "quiesce", role, str(model), "--log-level=debug", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=env)
    made.processes[name] = process
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ready(made: TwoHosts) -> bool:
    for name, process in made.processes.items():
        assert process.poll() is None, f"{name} ended: {made.logs[name].read_text()[-2000:]}"
    try:
        return made.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_an_answer_passes_between_two_hosts_over_certificates_on_both_sides(two: TwoHosts, tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", page_size=16, pool_pages=64, deterministic=True)
    (alone,) = LocalEngine(engine).generate([PROMPT], [Sampling(max_tokens=12, ignore_eos=True)], chunk=64)
    expected = Tokenizer.from_file(str(tiny / "tokenizer.json")).decode(alone)
    with (
        two.client(two.hosts.beta) as http,
        openai.OpenAI(
            base_url=f"{two.urls['router']}/v1", api_key=API_KEY, max_retries=0, http_client=http
        ) as client,
    ):
        fields = {"model": tiny.name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = client.completions.create(**fields, extra_body={"ignore_eos": True})
        assert answer.choices[0].text == expected
        pieces = client.completions.create(**fields, extra_body={"ignore_eos": True}, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == expected
    for port in ("prefill-0", "decode-0"):
        assert two.get("/health_generate", port).status_code == 200
    assert len(two.get("/workers", "admin", ADMIN_KEY).json()["workers"]) == 2
    health = two.get("/health?probe=1").json()
    assert sorted(health["probes"]) == ["decode-0", "prefill-0"]

    def idle() -> bool:
        return not any(not_idle(state) for state in two.get("/debug/ledger").json().values())

    until(idle, 30, "every page to be back")
    said = two.logs["prefill-0"].read_text()
    assert "tcp" in said, "the pages went over the network"


def test_d3_the_limit_that_both_hosts_agreed_on_is_shown_and_refused_by_at_every_port(two: TwoHosts) -> None:
    def agreed() -> dict[str, int]:
        return {name: state["agreed_limit"] for name, state in two.get("/debug/ledger").json().items()}

    until(lambda: agreed() == dict.fromkeys(CONTEXTS, 384), 30, "the heartbeats that say so")
    for port in ("router", "prefill-0", "decode-0"):
        assert two.get("/v1/models", port).json()["data"][0]["max_model_len"] == 384
    body = {"input_ids": [5] * 384, "sampling_params": {"max_new_tokens": 1}, "bootstrap_room": 7}
    with two.client(two.hosts.beta, "prefill-0") as client:
        answer = client.post("/generate", json=body | {"bootstrap_host": "127.0.0.1"})
    assert answer.status_code == 400 and "384" in answer.text


def _none(two: TwoHosts) -> Path | None:
    return None


def _other(two: TwoHosts) -> Path | None:
    return two.hosts.stranger


def _ended(two: TwoHosts) -> Path | None:
    return two.hosts.ended


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    ("shows", "counted"),
    [(_none, "http_tls_no_certificate"), (_other, "http_tls_bad_certificate"), (_ended, "http_tls_bad_certificate")],
    ids=["none", "of another authority", "ended"],
)
def test_who_shows_no_good_certificate_is_refused_at_every_port_and_counted(
    two: TwoHosts, port: str, shows: Callable[[TwoHosts], Path | None], counted: str
) -> None:
    before = two.counter(counted)
    with two.client(shows(two), port) as client, pytest.raises(httpx.HTTPError):
        client.get("/health")
    until(lambda: two.counter(counted) == before + 1, 30, f"{counted} to count it")


def test_plain_http_gets_nothing(two: TwoHosts) -> None:
    before = two.counter("http_tls_failed")
    with pytest.raises(httpx.HTTPError):
        httpx.get(two.urls["router"].replace("https", "http") + "/health", timeout=60)
    until(lambda: two.counter("http_tls_failed") > before, 30, "it to be counted")


def test_a_server_of_another_authority_is_not_believed(two: TwoHosts) -> None:
    """The client's side of it: who took the router's place is found out."""
    context = two.hosts.client(two.hosts.beta)
    context.load_verify_locations(str(two.hosts.stranger / "tls" / "ca.pem"))
    good = httpx.get(f"{two.urls['router']}/ready", verify=context, timeout=60)
    assert good.status_code == 200
    only = ssl.create_default_context(cafile=str(two.hosts.stranger / "tls" / "ca.pem"))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{two.urls['router']}/ready", verify=only, timeout=60)


def test_secrets_are_in_no_log_on_no_page_and_in_no_command_line(two: TwoHosts) -> None:
    """Control keys, private keys of TLS, operators' and API keys, a wrong one that somebody tried, a prompt."""
    wrong = "sk-mistyped-by-a-client"
    assert two.get("/v1/models", key=wrong).status_code == 401
    assert two.get("/workers", "admin", wrong).status_code == 401
    with two.client(two.hosts.beta) as client:
        body = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": TEXT, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
    secrets = {API_KEY, ADMIN_KEY, wrong, TEXT}
    for path in two.hosts.folder.rglob("*.key"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("-----")]
        secrets |= set(lines[1:]) if path.parent.name != "tls" and path.name != "ca.key" else set(lines)
    assert len(secrets) >= 4 + 3 + 4 and all(len(secret) > 12 for secret in secrets)
    pages = ("/health?probe=1", "/metrics", "/debug/ledger", "/v1/models", "/openapi.json")
    told = {page: two.get(page).text for page in pages}
    told |= {name: log.read_text() for name, log in two.logs.items()}
    for name, process in two.processes.items():
        told[f"command line of {name}"] = Path(f"/proc/{process.pid}/cmdline").read_text()
    assert all(len(text) > 30 for text in told.values())
    for where, text in told.items():
        for secret in secrets:
            assert secret not in text, where
