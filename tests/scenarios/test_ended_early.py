"""Requests that end around the end of prefill, whose other leg never comes, or while they are retracted."""

from __future__ import annotations

import random
import re
import secrets
import time
from collections import Counter
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.roles.prefill import ORPHAN_SECONDS
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_answered, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIR = ("prefill-0", "decode-0")
SIZES = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 32}
PROBE = list(range(10, 50))
LONG = [10 + i % 400 for i in range(7 * CHUNK)]
ONE = Sampling(max_tokens=1, ignore_eos=True)  # comes with the hand-off: the end of prefill is the end of the answer


def test_scenario_b53_deadlines_around_the_end_of_prefill_pin_nothing(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    """Each deadline is moved towards the end of prefill by how the one before it went, so that on any machine they
    fall a little before and a little after it. The hold timeout is a minute: nothing that is free came by it."""
    draw = random.Random(53)
    outcomes: Counter[str] = Counter()
    with Cluster(tiny, run_dir, hold_timeout=60.0, max_total_tokens=8192, **SIZES) as cluster:
        for name in PAIR:
            cluster.spawn(name.partition("-")[0], name)
        cluster.wait_for(*PAIR)
        warm = cluster.start(LONG, ONE, PAIR)
        until_over(cluster, [warm], 30)
        assert warm.first_token is not None
        patience = warm.first_token - warm.started
        for _ in range(80):
            request = cluster.start(LONG, ONE, PAIR, deadline=patience)
            until_over(cluster, [request], 30)
            outcomes[came_of(request)] += 1
            patience = max(0.002, patience * (0.85 if request.outcome == "length" else 1.15))
        wave = [cluster.start(LONG, ONE, PAIR, deadline=patience * draw.uniform(0.5, 5)) for _ in range(50)]
        until_over(cluster, wave, 40)
        outcomes.update(came_of(request) for request in wave)
        for name in PAIR:
            check_idle(cluster, name)
        fresh = cluster.start(PROBE, Sampling(max_tokens=12, ignore_eos=True), PAIR)
        until_over(cluster, [fresh], 30)
        assert fresh.tokens == oracle([PROBE])[0]
    assert outcomes["length"] >= 10 and outcomes["late"] >= 10 and sum(outcomes.values()) == 130, outcomes


def came_of(request: LabRequest) -> str:
    """Both legs have the deadline: whichever says so first, the other may be cancelled before it does."""
    late = any(ended.status == 504 for ends in request.ends.values() for ended in ends)
    return "late" if late and request.outcome != "length" else str(request.outcome)


def test_scenario_e88_a_room_that_the_other_worker_does_not_know_ends_soon_and_says_so(
    tiny: Path, run_dir: Path
) -> None:
    with Cluster(tiny, run_dir, hold_timeout=60.0, max_total_tokens=2048, **SIZES) as cluster:
        for name in PAIR:
            cluster.spawn(name.partition("-")[0], name)
        cluster.wait_for(*PAIR)
        until_over(cluster, [cluster.start(PROBE, ONE, PAIR)], 30)
        address, room = cluster.workers[PAIR[0]].address, secrets.randbits(62)
        other = cluster.start(PROBE, ONE, PAIR[:1], room=room + 1, deadline=30.0)  # a leg whose room differs by one
        lone = cluster.start(PROBE, ONE, PAIR[1:], prefill=address, room=room, deadline=30.0)
        until_answered(cluster, [lone], 20 * ORPHAN_SECONDS)
        took = time.monotonic() - lone.started
        (ended,) = lone.ends[PAIR[1]]
        assert (ended.outcome, ended.fault) == ("failed", "router") and f"room {room}" in ended.reason, ended
        assert took > ORPHAN_SECONDS * 0.9, "the other leg may still be on its way"
        cluster.cancel(other)
        until_over(cluster, [other], 30)
        for name in PAIR:
            check_idle(cluster, name)


def test_scenario_b98_cycles_of_overload_and_departure_leave_no_memory_behind(tiny: Path, run_dir: Path) -> None:
    draw = random.Random(98)
    with Cluster(tiny, run_dir, context_length=160, **SIZES) as cluster:
        cluster.spawn("prefill", PAIR[0], max_total_tokens=2048)
        cluster.spawn("decode", PAIR[1], max_total_tokens=400, schedule_conservativeness=0.0)
        cluster.wait_for(*PAIR)
        sizes = []
        for _ in range(10):
            before = cluster.inspect(PAIR[1])["retractions"]
            wave = [
                cluster.start(
                    [draw.randrange(8, 500) for _ in range(40)], Sampling(max_tokens=110, ignore_eos=True), PAIR
                )
                for _ in range(24)
            ]
            cluster.until(
                lambda before=before: cluster.inspect(PAIR[1])["retractions"] >= before + 5, 60, "retractions"
            )
            for request in wave:
                cluster.cancel(request)
            until_over(cluster, wave, 30)
            for name in PAIR:
                check_idle(cluster, name)
            sizes.append(_anonymous(cluster.workers[PAIR[1]].process.pid))
        late, early = sizes[-1], max(sizes[2:4])
        assert late - early < 0.01 * early * (len(sizes) - 4), sizes


def _anonymous(pid: int) -> int:
    """KiB of memory that is no file's, shared with those that it was forked with or not."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(value) for value in re.findall(r"^Anonymous:\s+(\d+) kB", rollup, re.MULTILINE))
