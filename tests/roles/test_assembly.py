"""A worker says at start-up what computes its steps, and warns where that is the slow way and nobody asked for it."""

import logging
from pathlib import Path

import pytest

from quiesce.engine.native import library
from quiesce.engine.native.library import VARIABLE
from quiesce.roles.assembly import make_engine
from quiesce.roles.settings import NativeLevel, WorkerSettings
from tiny_model import make_tiny_llama


def said(model: Path, caplog: pytest.LogCaptureFixture, level: NativeLevel = "auto") -> logging.LogRecord:
    settings = WorkerSettings(
        role="decode",
        name="decode-0",
        model=model,
        served_model_name="tiny",
        registry="ipc:///nowhere",
        registry_public_key="",
        keys=model,
        run_dir=model,
        dtype="float32",
        max_total_tokens=1024,
        native_level=level,
    )
    with caplog.at_level(logging.INFO, "quiesce.worker"):
        make_engine(settings).kv.close()
    (record,) = [record for record in caplog.records if record.getMessage().startswith("engine step: ")]
    return record


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    return make_tiny_llama(tmp_path / "tiny")


def test_the_native_step_is_named(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = said(model, caplog, "base")
    assert record.getMessage() == "engine step: native base, as asked"
    assert record.levelno == logging.INFO


def test_plain_pytorch_for_want_of_a_library_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    record = said(model, caplog)
    assert "plain PyTorch, several times slower: the native step was not built" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_plain_pytorch_that_was_asked_for_is_none(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert said(model, caplog, "off").levelno == logging.INFO
