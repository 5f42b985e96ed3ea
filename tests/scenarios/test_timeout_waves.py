"""Three hundred requests time out and are aborted at the same moment while prefill stands still; nobody minds."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_answered, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PREFILL, DECODES = "prefill-0", ("decode-0", "decode-1")
PROBE = list(range(10, 50))
DEADLINE = 1.0
HOLD = 5.0


def test_scenario_j14_aborts_around_the_deadline_with_prefill_stopped(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    """decode-0 has its session with prefill before, decode-1 has none. In the last round prefill stays away for
    longer than the hold timeout: its pages come back by a fence, with prefill still standing still."""
    draw = random.Random(14)
    right = oracle([PROBE])[0]
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 64, "context_length": 256}
    sizes |= {"max_held": 1.0, "max_retained": 1.0}  # a hold of a second refuses nobody
    with Cluster(tiny, run_dir, hold_timeout=HOLD, max_total_tokens=4096, **sizes) as cluster:
        for name in (PREFILL, *DECODES):
            cluster.spawn(name.split("-", maxsplit=1)[0], name)
        cluster.wait_for(PREFILL, *DECODES)
        warm = cluster.start(PROBE, twelve(), (PREFILL, DECODES[0]))
        until_over(cluster, [warm], 30)
        before = {name: cluster.inspect(name) for name in cluster.workers}
        for last in (False, False, True):
            cluster.kill(PREFILL, signal.SIGSTOP)
            stopped = time.monotonic()
            wave = {
                cluster.start(
                    [draw.randrange(8, 500) for _ in range(draw.randint(1, 120))],
                    Sampling(max_tokens=20, ignore_eos=True),
                    (PREFILL, DECODES[number % 2]),
                    deadline=DEADLINE,
                ): draw.uniform(0.9, 1.1)
                for number in range(300)
            }
            due = sorted(wave, key=lambda request: request.started + wave[request])
            for request in due:
                at = request.started + wave[request]
                cluster.until(lambda at=at: time.monotonic() >= at, 30, "the moment of an abort")
                for _ in range(1 + (draw.random() < 0.2)):  # aborting twice is harmless
                    with contextlib.suppress(RuntimeError):  # prefill's queue is full: its leg ends by its deadline
                        cluster.cancel(request)
            until_answered(cluster, wave, 30)
            if last:
                for name in DECODES:
                    check_idle(cluster, name, seconds=HOLD + 30)
                assert time.monotonic() - stopped > HOLD
                fenced = cluster.inspect(DECODES[0])["closed_by"]
                assert fenced.get("fenced", 0) + fenced.get("gone", 0) > 0
            cluster.kill(PREFILL, signal.SIGCONT)
            until_over(cluster, wave, 30)
            for request in wave:
                assert request.tokens == []
                assert all(len(ends) == 1 for ends in request.ends.values()), request.ends
                ended = {name: ends[0].outcome for name, ends in request.ends.items()}
                # Back again, prefill may hear an offer before what ended it, and write into pages that are held.
                assert ended.pop(PREFILL) in ("cancelled", "failed", "handed_over"), request.ends
                assert all(outcome in ("cancelled", "failed") for outcome in ended.values()), request.ends
            for name in cluster.workers:
                check_idle(cluster, name, seconds=HOLD + 30)
            probes = [cluster.start(PROBE, twelve(), (PREFILL, name)) for name in DECODES]
            until_over(cluster, probes, 30)
            assert [probe.tokens for probe in probes] == [right, right]
        for name, state in before.items():
            assert cluster.inspect(name)["epoch"] == state["epoch"], "nobody restarted"
        assert all(len(ends) == 1 for request in cluster.requests.values() for ends in request.ends.values())


def twelve() -> Sampling:
    return Sampling(max_tokens=12, ignore_eos=True)
