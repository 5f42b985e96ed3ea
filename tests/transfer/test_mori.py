"""MORI's adapter against a stand-in with its signatures. It moved no byte over RDMA: the docs' table says so."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiesce.core.posting import Outcome
from quiesce.transfer import mori
from quiesce.transfer.agent import MissingEngine
from quiesce.transfer.agents import AgentTransport
from transfer import fake_mori
from transfer.test_agents import ALL, Pair, numbered


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    package = types.ModuleType("mori")
    package.io = fake_mori  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mori", package)
    monkeypatch.setitem(sys.modules, "mori.io", fake_mori)
    (tmp_path / "verbs" / "rxe0").mkdir(parents=True)
    monkeypatch.setattr(mori, "ROCM", tmp_path)
    monkeypatch.setattr(mori, "VERBS", tmp_path / "verbs")
    made = Pair(mori.MoriEngine(), tmp_path)
    yield made
    for side in made.sides:
        side.transport.close_all()


def test_it_writes_and_reads_pages(pair: Pair) -> None:
    numbered(pair.poster)
    peer = pair.attach()
    assert pair.outcome(pair.poster.transport.write(peer, ALL, ALL[::-1], pair.grant())) is Outcome.PLACED
    assert (pair.lender.arena.pages[::-1] == pair.poster.arena.pages).all()
    assert pair.outcome(pair.poster.transport.read(peer, [0], [0], pair.grant(access="read"))) is Outcome.PLACED
    assert (pair.poster.arena.pages[0] == pair.lender.arena.pages[0]).all()


def test_a_failed_status_is_unknown_and_nothing_proves_its_end(pair: Pair) -> None:
    numbered(pair.poster)
    peer = pair.attach()
    grant = pair.grant()
    fake_mori.IOEngineSession.fail = True
    assert pair.outcome(pair.poster.transport.write(peer, ALL, ALL, grant)) is Outcome.UNKNOWN
    pair.until(lambda: pair.poster.lost, "the connection to be made anew")
    assert not pair.poster.transport.drain(peer)
    assert pair.lender.transport.fence(pair.poster.epoch, grant.generation) is None
    assert pair.lender.transport.gone(pair.poster.epoch) is None


def test_without_devices_its_library_is_not_even_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end this process."""
    monkeypatch.setattr(mori, "ROCM", tmp_path / "none")
    with pytest.raises(MissingEngine, match="needs an AMD GPU with ROCm"):
        AgentTransport(mori.MoriEngine(), tmp_path, 1)
    monkeypatch.setattr(mori, "ROCM", tmp_path)
    monkeypatch.setattr(mori, "VERBS", tmp_path / "none")
    with pytest.raises(MissingEngine, match="needs an RDMA device"):
        AgentTransport(mori.MoriEngine(), tmp_path, 1)
    (tmp_path / "verbs" / "rxe0").mkdir(parents=True)
    monkeypatch.setattr(mori, "VERBS", tmp_path / "verbs")
    with pytest.raises(MissingEngine, match="MORI is not installed: pip install amd-mori"):
        AgentTransport(mori.MoriEngine(), tmp_path, 1)
