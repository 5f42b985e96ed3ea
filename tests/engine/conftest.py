"""One tiny model for the whole folder, the same weights in transformers, and engines: the best step of this machine,
and plain PyTorch."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quiesce.engine.engine import Engine
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(tiny: Path) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Engine:
    return Engine(tiny, dtype="float32", page_size=16, pool_pages=128)


@pytest.fixture(scope="session")
def exact_engine(tiny: Path) -> Engine:
    return Engine(tiny, dtype="float32", page_size=16, pool_pages=256, deterministic=True)


@pytest.fixture(scope="session")
def plain_engine(tiny: Path) -> Engine:
    return Engine(tiny, dtype="float32", page_size=16, pool_pages=128, native_level="off")


@pytest.fixture(scope="session")
def plain_exact_engine(tiny: Path) -> Engine:
    return Engine(tiny, dtype="float32", page_size=16, pool_pages=256, deterministic=True, native_level="off")
