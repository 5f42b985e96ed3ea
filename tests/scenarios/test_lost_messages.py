"""One message of each kind between decode and prefill is lost, doubled or late: every request ends, and right."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.lossy import Mischief
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ANSWER = 12
LATE = 0.7  # seconds; by then the next requests are under way, also with the pages of the one it is about
FATES = ("drop", "duplicate", "delay")
OFTEN = ("Offer", "Accept", "Done", "Ack", "Abort", "Drained", "Ping", "Pong", "Await", "Reached", "Failed")
ONCE = ("Hello", "Welcome", "Confirm")  # of a session
SOMETIMES = ("Busy", "Tainted", "NeverStarted", "Refused")
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")

MISCHIEF = (
    *(Mischief(kind, fate, 2 + 2 * i, LATE) for kind in OFTEN for i, fate in enumerate(FATES)),
    *(Mischief(kind, fate, 1 + i, LATE) for kind in ONCE + SOMETIMES for i, fate in enumerate(FATES)),
)


def test_scenario_c46_c94_a_message_of_each_kind_lost_doubled_and_late(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    draw = random.Random(46)
    prompts = [[draw.randrange(8, 500) for _ in range(draw.randint(20, 100))] for _ in range(16)]
    expected = oracle(prompts, ANSWER)
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 16, "context_length": 128}
    with Cluster(tiny, run_dir, hold_timeout=3.0, max_retained=1.0, **sizes) as cluster:
        cluster.spawn("prefill", PREFILLS[0], Faults(ms_per_page=(2, 6), mischief=MISCHIEF), max_total_tokens=2048)
        failing = Faults(ms_per_page=(1, 3), fail=0.25, unknown=0.05, mischief=MISCHIEF)
        cluster.spawn("prefill", PREFILLS[1], failing, max_total_tokens=2048)
        cluster.spawn("decode", DECODES[0], Faults(mischief=MISCHIEF), max_total_tokens=640)
        cluster.spawn("decode", DECODES[1], Faults(mischief=MISCHIEF), max_total_tokens=640, reserve="late")
        cluster.wait_for(*PREFILLS, *DECODES)

        def crowd(count: int, prefill: str, cut: float) -> list[tuple[LabRequest, int]]:
            """Six at a time; a share `cut` of them is cancelled at a random moment."""
            made: list[tuple[LabRequest, int]] = []
            cuts: dict[LabRequest, float] = {}
            sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
            for number in range(count):
                at_once = lambda: sum(not request.over for request, _ in made) < 6  # noqa: E731
                cluster.until(lambda ready=at_once: _cancel_due(cluster, cuts) or ready(), 40, "a request to end")
                index = number % len(prompts)
                request = cluster.start(prompts[index], sampling, (prefill, DECODES[number % 2]), deadline=25)
                made.append((request, index))
                if draw.random() < cut:
                    cuts[request] = request.started + draw.uniform(0.0, 0.15)
            done = lambda: all(request.over for request, _ in made)  # noqa: E731
            cluster.until(lambda: _cancel_due(cluster, cuts) or done(), 40, "every request to end")
            return made

        for request, index in crowd(60, PREFILLS[0], cut=0.0):
            assert request.outcome == "length", request.ends
            assert request.tokens == expected[index]
        for request, index in crowd(40, PREFILLS[0], cut=0.6) + crowd(60, PREFILLS[1], cut=0.2):
            assert [len(ends) for ends in request.ends.values()] == [1, 1], "one last word from each leg"
            if request.outcome == "length":
                assert request.tokens == expected[index]
            assert request.tokens == expected[index][: len(request.tokens)]

        for name in cluster.workers:
            check_idle(cluster, name, seconds=30)
        met: set[str] = set()
        wanted = {f"{fate} {kind}" for kind in OFTEN for fate in FATES} | {f"drop {kind}" for kind in ONCE}

        def all_met() -> bool:  # PINGs and PONGs come by the second
            met.update(fate for name in cluster.workers for fate in cluster.inspect(name)["mischief"])
            return met >= wanted

        with contextlib.suppress(TimeoutError):
            cluster.until(all_met, 30, "every fate")
        assert all_met(), f"never met: {wanted - met}"


def _cancel_due(cluster: Cluster, cuts: dict[LabRequest, float]) -> bool:
    """Cancels whoever's time has come. Always False, to stand in a condition."""
    for request, at in list(cuts.items()):
        if time.monotonic() >= at:
            del cuts[request]
            if not request.over:
                cluster.cancel(request)
    return False
