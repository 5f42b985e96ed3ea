"""The conformance suite over shared memory, with real processes, and what it must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.transfer import conformance
from quiesce.transfer.conformance import Bench, Nonconforming


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_shm_conforms(check: Callable[[Bench], None]) -> None:
    conformance.run(check, "quiesce.transfer.shm:factory")


@pytest.mark.parametrize(
    ("factory", "check", "said"),
    [
        ("fence_by_word", conformance.fence_is_final, "after the proof"),
        ("gone_too_soon", conformance.death_of_the_poster_is_shown, "called dead while it writes"),
        ("placed_by_word", conformance.placed_means_visible, "not visible"),
        ("any_generation", conformance.wrong_generation_is_refused, "PLACED"),
        ("any_generation", conformance.fence_is_final, "after the proof"),
    ],
)
def test_the_suite_notices(
    factory: str, check: Callable[[Bench], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    monkeypatch.syspath_prepend(here)
    with pytest.raises(Nonconforming, match=said):
        conformance.run(check, f"broken:{factory}")
