"""What `quiesce doctor` says of transfer engines, and its abort on scratch pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import by_name, said

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.ops import doctor_ack, doctor_transfer
from quiesce.ops.doctor_finding import Finding, ok, warn
from quiesce.options import HandOffOptions
from quiesce.transfer.interface import Peer, Post
from quiesce.transfer.null import NullTransport
from quiesce.transfer.tcp import TcpTransport


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_an_abort_on_scratch_pages_brings_drained_back(direction: Any):
    for make in (NullTransport, lambda epoch: TcpTransport(epoch, lanes=1)):
        told = doctor_ack.abort(make, direction)
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

    read = write


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Silent, ("no proof within", "BUSY")),
        (Doubtful, ("no proof within", "TAINTED")),
        (Raising, ("queue is broken",)),
    ],
)
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_an_ack_path_that_brings_no_proof_fails(kind: type[NullTransport], words: tuple[str, ...], direction: Any):
    for seconds in (1.0, 10.0):  # the first may be over before anything was said
        told = doctor_ack.abort(kind, direction, seconds)
        if all(word in told.trouble + " ".join(told.answers) for word in words):
            break
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
    said(by_name(doctor_transfer.findings("tcp", words, pull))["ack path tcp"], "ok", "DRAINED")
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
