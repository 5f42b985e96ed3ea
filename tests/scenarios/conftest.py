"""What the scenarios share: tiny models, the oracle, clusters of real workers, and two servers to compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import short_folder, warmed
from e2e.product import Product
from quiesce.core.messages import Sampling
from quiesce.engine.engine import Engine
from quiesce.engine.local import LocalEngine
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from scenarios.chain_model import make_chain_model
from tiny_model import make_tiny_llama

PAGE, CHUNK, CONTEXT = 16, 64, 512
SERVE = (
    *(f"--context-length={CONTEXT}", "--max-total-tokens=16384", f"--chunked-prefill-size={CHUNK}"),
    *("--hold-timeout=5", "--drain-timeout=5", "--dtype=float32", "--deterministic"),
    "--native-level=off",  # with the native step so small a model has answered before a test can break anything
)

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=4)


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    """The single-process engine: `oracle(prompts, tokens)`."""
    local = LocalEngine(Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True))

    def answers(prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
        sampling = [Sampling(max_tokens=tokens, ignore_eos=True)] * len(prompts)
        return local.generate(prompts, sampling, chunk=CHUNK, concurrency=4)

    return answers


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Unix socket paths are short, pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="qs-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chain_model(tmp_path_factory.mktemp("models") / "chain")


@pytest.fixture(scope="session")
def pd(chain: Path) -> Iterator[Product]:
    """One prefill and one decode worker behind the router."""
    with short_folder() as path, Product(chain, Path(path), *SERVE) as product:
        yield warmed(product)


@pytest.fixture(scope="session")
def one(chain: Path) -> Iterator[Product]:
    """The same weights in one engine: what right answers look like."""
    with short_folder() as path, Product(chain, Path(path), *SERVE, "--colocated") as product:
        yield warmed(product)


def until_over(cluster: Cluster, requests: Iterable[LabRequest], seconds: float) -> None:
    """Both legs of each have said their last word."""
    waiting = list(requests)
    cluster.until(lambda: all(request.over for request in waiting), seconds, "every request to end")


def until_answered(cluster: Cluster, requests: Iterable[LabRequest], seconds: float) -> None:
    """The answering leg of each has said its last word."""
    waiting = list(requests)
    cluster.until(lambda: all(request.outcome for request in waiting), seconds, "every answer to end")


def check_idle(
    cluster: Cluster, name: str, seconds: float = 30.0, boot: dict[str, Any] | None = None, but: tuple[str, ...] = ()
) -> None:
    """`but`: beginnings of lines that are allowed to stand."""

    def why() -> list[str]:
        return [line for line in not_idle(cluster.inspect(name), boot) if not line.startswith(but)]

    try:
        cluster.until(lambda: not why(), seconds, f"{name} to be idle")
    except TimeoutError:
        raise AssertionError(f"{name} is not idle:\n  " + "\n  ".join(why())) from None
