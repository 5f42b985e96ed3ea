"""Fixtures for tests with real worker processes: short run directories, the oracle, a cluster that leaves nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from tiny_model import make_tiny_llama

PAGE = 16
CHUNK = 64


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=4)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Unix socket paths are short, pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="qs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Callable[..., list[list[int]]]:
    """The single-process engine: `oracle(prompts, tokens)`."""
    local = LocalEngine(Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True))

    def answers(prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
        sampling = [Sampling(max_tokens=tokens, ignore_eos=True)] * len(prompts)
        return local.generate(prompts, sampling, chunk=CHUNK, concurrency=4)

    return answers
