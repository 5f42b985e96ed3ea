"""What a transport must be able to prove before a worker serves with it, and what operators are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Waiver
from quiesce.roles import assembly, decode, prefill
from quiesce.roles.proving import cautions, check_transport, worn_out
from quiesce.roles.settings import Role, SettingsError, WorkerSettings
from quiesce.transfer.shm import CAPABILITIES

BLIND = replace(CAPABILITIES, name="blind", lane="tcp", drain="none", fence="none")


def settings(role: Role = "decode", **more: Any) -> WorkerSettings:
    here = Path()
    plain = {
        "served_model_name": "m",
        "registry": "ipc:///r",
        "registry_public_key": "k",
        "keys": here,
        "run_dir": here,
    }
    return WorkerSettings(role=role, name="w", model=here, **plain, **more)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_transport_without_a_drain_proof_is_refused_unless_it_is_allowed(role: Role) -> None:
    check_transport(CAPABILITIES, settings(role))
    with pytest.raises(SettingsError, match=r"--transfer blind/tcp cannot prove .* --allow-unproven"):
        check_transport(BLIND, settings(role))
    check_transport(BLIND, settings(role, allow_unproven=True))


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_direction_that_the_transport_does_not_have_is_refused(direction: Any) -> None:
    other = replace(CAPABILITIES, push=direction == "pull", pull=direction == "push")
    with pytest.raises(SettingsError, match=f"--direction {direction}: shm cannot"):
        check_transport(other, settings(direction=direction))


def test_a_worker_refuses_it_before_it_opens_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "make_engine", lambda settings: SimpleNamespace())
    monkeypatch.setattr(assembly, "make_transport", lambda settings: SimpleNamespace(caps=BLIND))
    for role, run in (("prefill", prefill.run), ("decode", decode.run)):
        with pytest.raises(SettingsError, match="--allow-unproven"):
            run(settings(role))  # type: ignore[arg-type]


def test_cautions_are_what_is_less_safe_than_the_default() -> None:
    ledger = Ledger(PagePool(8), PagePool(2, "rows"))
    assert cautions(CAPABILITIES, settings(), ledger) == ()
    tid = TransferId(7, 1)
    ledger.own(tid, 3)
    key = LeaseKey.compute(tid)
    ledger.lend(key)
    ledger.end(tid)
    ledger.retain(tid)
    assert worn_out(ledger, 3 / 8, None) is None
    assert worn_out(ledger, 0.25, None) == "more than 25 % of the pool is retained without proof"
    assert worn_out(ledger, 3 / 8, "64 agents are left over") == "64 agents are left over"
    said = cautions(BLIND, settings(allow_unproven=True, on_hold_expiry="release"), ledger)
    assert [
        words
        for words in ("blind/tcp cannot prove", "--on-hold-expiry=release", "3 of 8 pages")
        if words in str(said)
    ]
    assert len(said) == 3
    ledger.waive(key, Waiver("asked for"))
    assert cautions(CAPABILITIES, settings(), ledger) == ("1 leases were closed without proof",)
