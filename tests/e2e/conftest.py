"""Servers to test against: the tiny model for most, one for each module."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.product import Product
from tiny_model import make_tiny_llama

CONTEXT, CHUNK = 2048, 64
SIZES = (f"--context-length={CONTEXT}", "--max-total-tokens=16384", f"--chunked-prefill-size={CHUNK}")
# The plain step: with the native one a tiny model has answered before a test can break anything.
QUICK = ("--hold-timeout=5", "--drain-timeout=5", "--dtype=float32", "--native-level=off")


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Unix socket paths are short, pytest's folders are not."""
    return tempfile.TemporaryDirectory(prefix="q-", dir="/tmp")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=4, context=CONTEXT)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield Path(path)


@pytest.fixture(scope="module")
def serve(tiny: Path) -> Iterator[Product]:
    with short_folder() as path, Product(tiny, Path(path), *SIZES, *QUICK) as product:
        yield warmed(product)


@pytest.fixture
def fresh(tiny: Path, folder: Path) -> Iterator[Product]:
    """One that the test may damage."""
    with Product(tiny, folder, *SIZES, *QUICK) as product:
        yield warmed(product)


def warmed(product: Product) -> Product:
    """Ready, with the sessions between workers made, so that `boot` has every thread and descriptor in it."""
    product.wait()
    product.ask([10, 11, 12], tokens=4)
    product.check_idle()
    product.boot = product.ledger()
    return product
