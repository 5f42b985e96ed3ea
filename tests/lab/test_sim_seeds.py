"""Seeds that nobody has seen: drawn for each run of the tests, printed at its end, and again with a failure."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from quiesce.lab.sim.command import replay
from quiesce.lab.sim.run import simulate_seed
from quiesce.lab.sim.shrink import tell

REQUESTS = 200
SEEDS = 25  # of one part
PARTS = range(12)
IN_EVERY_RUN = 3  # the others in `make test-long`

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.long] if part >= IN_EVERY_RUN else []) for part in PARTS]
)
def test_fresh_seeds_break_no_rule(part: int, record_property: Callable[[str, object], None]) -> None:
    first = int.from_bytes(os.urandom(6), "big")
    print(f"seeds {first} to {first + SEEDS - 1}")
    record_property("simulated seeds", f"{first} to {first + SEEDS - 1}")
    for seed in range(first, first + SEEDS):
        report = simulate_seed(seed, REQUESTS)
        if report.broken is not None:
            story = "\n".join(tell(report.world, strict=True)[1])
            pytest.fail(f"seed {seed}: {report.broken}\nagain: {replay(seed, REQUESTS)}\n{story}")
