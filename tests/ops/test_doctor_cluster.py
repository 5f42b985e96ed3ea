"""What `quiesce doctor` says of keys and of a running cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from doctor_findings import by_name, said

from quiesce.channel import KeyPair, KeyRing
from quiesce.ops import doctor_cluster, doctor_keys
from quiesce.ops.doctor_finding import Finding
from quiesce.ops.doctor_report import as_json

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
