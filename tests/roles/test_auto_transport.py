"""`--transfer auto` takes what works on this machine, and goes without an engine that cannot prove anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quiesce.engine.errors import EngineError
from quiesce.roles import assembly
from quiesce.roles.settings import WorkerSettings
from quiesce.transfer import registry
from quiesce.transfer.null import NullTransport


def settings(run_dir: Path, *, allow_unproven: bool) -> WorkerSettings:
    return WorkerSettings(
        role="decode",
        name="decode-0",
        model=run_dir,
        served_model_name="m",
        registry="ipc:///r",
        registry_public_key="k",
        keys=run_dir,
        run_dir=run_dir,
        transfer="auto",
        allow_unproven=allow_unproven,
    )


class Unproven(NullTransport):
    caps = replace(NullTransport.caps, drain="none", fence="none")


def test_auto_goes_without_what_cannot_prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "candidates", lambda: ["one", "null"])
    monkeypatch.setattr(
        registry, "make", lambda label, setup: (Unproven if label == "one" else NullTransport)(setup.epoch)
    )
    careful = assembly.make_transport(settings(tmp_path, allow_unproven=False))
    assert careful.caps == NullTransport.caps
    careful.close_all()
    bold = assembly.make_transport(settings(tmp_path, allow_unproven=True))
    assert bold.caps.drain == "none"
    bold.close_all()
    monkeypatch.setattr(registry, "candidates", lambda: ["one"])
    with pytest.raises(EngineError, match="no transfer engine works"):
        assembly.make_transport(settings(tmp_path, allow_unproven=False))
