"""What all tests need: Triton's interpreter where there is no GPU, said before Triton is loaded; and an order."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# NIXL agents whose readers have gone without a word cannot be ended, and their threads spin as long as this process.
LEAVES_THREADS_SPINNING = "transfer/test_agents.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those come last, with `--no-loadscope-reorder`: whatever ran behind them had less than one core."""
    items.sort(key=lambda item: LEAVES_THREADS_SPINNING in item.nodeid)
