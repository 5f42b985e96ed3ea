"""Hub ids, against a local server that speaks the hub's own HTTP: what is fetched, and what is said if it is not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tiny_model import make_tiny_llama

COMMIT = "c0ffee00" * 5
CALL = """
import sys
from quiesce.models import registry
from quiesce.models.errors import ModelError
try:
    print(getattr(registry, sys.argv[1])(sys.argv[2], progress=False))
except ModelError as error:
    sys.exit(f"ModelError: {error}")
"""
LIST = "from quiesce.models import registry\nfor e in registry.list_models(): print(e.name, e.state, e.bytes)"


class Hub(ThreadingHTTPServer):
    """Serves one folder as the model org/tiny and remembers which files were asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fetched: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/api/models/org/tiny/revision/main":
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            files = [item for item in self.server.folder.rglob("*") if item.is_file()]
            self.answer(json.dumps([self.entry(item) for item in files]).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            self.server.fetched.append(name)
            self.answer((self.server.folder / name).read_bytes())
        else:
            code = "RevisionNotFound" if path.startswith("/api/models/org/tiny/") else "RepoNotFound"
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def entry(self, item: Path) -> dict[str, object]:
        name = str(item.relative_to(self.server.folder))
        return {"type": "file", "path": name, "size": item.stat().st_size, "oid": etag(item.read_bytes())}

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = make_tiny_llama(tmp_path / "origin")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"another copy")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_bytes(b"{}")
    server = Hub(folder)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(hub: Hub, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter: huggingface_hub reads its environment once, when it is imported."""
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(tmp_path / "hf"),
        "QUIESCE_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_a_hub_model_is_fetched_without_pickles_and_then_found_offline(hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, CALL, "resolve", "org/tiny")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert wanted >= set(hub.fetched)
    asked = len(hub.fetched)
    for name in ("org/tiny", f"org/tiny@{COMMIT}"):
        again = run(hub, tmp_path, CALL, "resolve", name, HF_ENDPOINT="http://127.0.0.1:9")
        assert again.stdout == first.stdout, again.stderr
    assert len(hub.fetched) == asked
    listed = run(hub, tmp_path, LIST)
    assert listed.stdout.splitlines()[0] == "smollm2 absent 0"
    assert listed.stdout.splitlines()[1].startswith("org/tiny ready ")


def test_an_incomplete_snapshot_is_completed(hub: Hub, tmp_path: Path) -> None:
    folder = Path(run(hub, tmp_path, CALL, "resolve", "org/tiny").stdout.strip())
    weights = folder / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert run(hub, tmp_path, LIST).stdout.splitlines()[1].startswith("org/tiny damaged ")
    assert run(hub, tmp_path, CALL, "resolve", "org/tiny").stdout.strip() == str(folder)
    assert weights.read_bytes() == (hub.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("org/none", {}, "The hub has no model org/none that you may read."),
        ("org/tiny@v9", {}, "org/tiny has no revision 'v9' on the hub."),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "org/tiny is not in the local cache, and the hub cannot"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "org/tiny is not in the local cache, and the hub cannot be reached"),
        ("org/-bad-", {}, "The hub did not give org/-bad-"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_sentence(
    hub: Hub, tmp_path: Path, name: str, environment: dict[str, str], message: str
) -> None:
    result = run(hub, tmp_path, CALL, "pull", name, **environment)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith(f"ModelError: {message}"), result.stderr
    assert "Traceback" not in result.stderr
