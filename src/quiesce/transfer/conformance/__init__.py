"""What every transport must show, with real processes: `quiesce conformance NAME`.

NAME is an engine of the registry, with a lane if need be, or `module:function`, a function (run_dir, epoch, pages,
page_bytes) -> (transport, arena). Each check takes a Bench and raises Nonconforming with what was seen. What an
engine does not claim is not asked of it, and the check says so.
"""

from __future__ import annotations

from quiesce.transfer.conformance.bench import ALL, PAGE_BYTES, PAGES, Bench, Nonconforming
from quiesce.transfer.conformance.deaths import (
    death_of_the_lender_ends_posts,
    death_of_the_poster_is_shown,
    fence_is_final,
)
from quiesce.transfer.conformance.run import CHECKS, check_engine, report, run
from quiesce.transfer.conformance.writes import placed_means_visible, wrong_generation_is_refused

__all__ = [
    "ALL",
    "CHECKS",
    "PAGES",
    "PAGE_BYTES",
    "Bench",
    "Nonconforming",
    "check_engine",
    "death_of_the_lender_ends_posts",
    "death_of_the_poster_is_shown",
    "fence_is_final",
    "placed_means_visible",
    "report",
    "run",
    "wrong_generation_is_refused",
]
