"""The conformance suite over our own engines, with real processes, and what it must notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.transfer import conformance
from quiesce.transfer.conformance import Bench, Nonconforming, bench, deaths, endurance, reads, writes

PATIENT = 30.0  # seconds in which a late write is waited for, where one is sure to come
FIRST_WINDOW = {"fence_by_word", "open_gates", "clean_by_word"}  # what these do late, they do after the first proof
FEWEST = 0.05  # at which 10,000 transfers are 500; a leak is noticed there as well
NOT_CLAIMED = {"what_was_not_lent_is_refused", "fence_of_pages_disturbs_no_others"}  # by shm


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_shm_conforms(check: Callable[[Bench], None]) -> None:
    said = conformance.run(check, "shm")
    assert (said is None) == (check.__name__ not in NOT_CLAIMED), said


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_tcp_conforms(check: Callable[[Bench], None]) -> None:
    assert conformance.run(check, "tcp") is None, "it claims everything that there is a check for"


@pytest.mark.parametrize(
    ("factory", "check", "said"),
    [
        ("fence_by_word", conformance.fence_is_final, "after the proof"),
        ("gone_too_soon", conformance.death_of_the_poster_is_shown, "called dead while it writes"),
        ("placed_by_word", conformance.placed_means_visible, "not visible"),
        ("any_generation", conformance.wrong_generation_is_refused, "PLACED"),
        ("any_generation", conformance.fence_is_final, "after the proof"),
        ("open_gates", deaths.fence_is_final, "after the proof"),
        ("open_gates", deaths.fence_of_pages_disturbs_no_others, "after the proof"),
        ("lends_all", writes.what_was_not_lent_is_refused, "PLACED"),
        ("lends_all", reads.wrong_reads_are_refused, "instead of FAILED_CLEAN"),
        ("clean_by_word", deaths.no_failure_lands_late, "after the proof"),
        ("cancels_by_word", writes.cancelled_posts_never_land, "cancelled with proof"),
        ("forgets_nothing", endurance.ten_thousand_transfers_grow_nothing, "memory of the poster grew by"),
        ("lends_for_good", endurance.ten_thousand_transfers_grow_nothing, "memory of the lender grew by"),
        ("leaks_files", endurance.ten_thousand_transfers_grow_nothing, "files of the poster"),
        ("leaks_threads", endurance.ten_thousand_transfers_grow_nothing, "threads of the poster"),
    ],
)
def test_the_suite_notices(
    factory: str, check: Callable[[Bench], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here, prepend=os.pathsep)
    monkeypatch.syspath_prepend(here)
    if factory in FIRST_WINDOW:
        monkeypatch.setattr(bench, "WATCH_FOR_LATE", PATIENT)
    if check is endurance.ten_thousand_transfers_grow_nothing:
        monkeypatch.setattr(bench, "SCALE", FEWEST)
    with pytest.raises(Nonconforming, match=said):
        conformance.run(check, f"broken:{factory}")


def test_a_pool_that_grows_by_steps_and_stops_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here, prepend=os.pathsep)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(bench, "SCALE", FEWEST)
    assert conformance.run(endurance.ten_thousand_transfers_grow_nothing, "broken:pool_grows") is None


@pytest.mark.parametrize(
    ("then", "said"), [([[7, "UNKNOWN"]], "after a fence it ended UNKNOWN"), ([], "after a fence as well")]
)
def test_a_post_that_never_ends_is_fenced_and_said_to_have_none(
    then: list[list[object]], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "PATIENCE", 0.05)
    fenced: list[int] = []

    class Silent(bench.Far):
        def __init__(self, parties: Bench) -> None:
            self.epoch, self.seen, self._bench = 5, {}, parties

        def outcomes(self) -> list[list[object]]:
            return then if fenced else []

    parties = Bench("null", tmp_path)
    monkeypatch.setattr(parties, "fence", fenced.append)
    with pytest.raises(Nonconforming, match=f"in vain for the outcome of post 7.*{said}"):
        Silent(parties).outcome(7)
    assert fenced == [5]
