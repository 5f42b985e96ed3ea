"""Operators' choices about what cannot be proven, on workers whose transport has neither fence nor drain."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE, PROMPT, POOL = 16, 120, 512  # tokens: a prompt is 8 of 32 pages
LOSING, GOOD, HOLDS, FREES = "prefill-0", "prefill-1", "decode-0", "decode-1"
EXIT_RETAINED = 75
Oracle = Callable[..., list[list[int]]]


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(8, 500) for _ in range(PROMPT)]


@pytest.fixture(scope="module")
def blind(tiny: Path) -> Iterator[Cluster]:
    """Nobody can prove anything; whatever `prefill-0` posts ends UNKNOWN."""
    sizes = {"page_size": PAGE, "chunked_prefill_size": 64, "max_running": 8, "max_total_tokens": POOL}
    with (
        tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder,
        Cluster(
            tiny, Path(folder), allow_unproven=True, hold_timeout=6.0, max_held=1.0, max_held_per_tenant=1.0, **sizes
        ) as cluster,
    ):
        cluster.spawn("prefill", LOSING, Faults(proves=False, unknown=1.0), max_retained=1.0)
        cluster.spawn("prefill", GOOD, Faults(proves=False))
        cluster.spawn("decode", HOLDS, Faults(proves=False))
        cluster.spawn("decode", FREES, Faults(proves=False), on_hold_expiry="release")
        cluster.wait_for(LOSING, GOOD, HOLDS, FREES)
        yield cluster


def ask(cluster: Cluster, seed: int, prefill: str, decode: str, answer: int = 12) -> LabRequest:
    return cluster.start(prompt(seed), Sampling(max_tokens=answer, ignore_eos=True), (prefill, decode))


def over(cluster: Cluster, *requests: LabRequest) -> None:
    cluster.until(lambda: all(request.over for request in requests), 30, "the last words")


def values(cluster: Cluster, name: str) -> dict[tuple[str, str | None], float]:
    samples = cluster.inspect(name)["samples"]
    return {(s.name.removeprefix("quiesce:"), dict(s.labels).get("outcome")): s.value for s in samples}


def test_a_worker_that_can_prove_nothing_says_so(blind: Cluster) -> None:
    for name in (LOSING, GOOD, HOLDS, FREES):
        assert values(blind, name)["transport_unproven", None] == 1
    assert "cannot prove" in str(blind.workers[HOLDS].cautions) and "--allow-unproven" in str(
        blind.workers[HOLDS].cautions
    )
    assert "--on-hold-expiry=release" in str(blind.workers[FREES].cautions)


def test_release_frees_after_the_hold_timeout_and_counts_and_logs_each_use(blind: Cluster, oracle: Oracle) -> None:
    lost = ask(blind, 1, LOSING, FREES)
    over(blind, lost)
    assert lost.outcome in ("failed", "cancelled") and not lost.tokens
    blind.until(lambda: not not_idle(blind.inspect(FREES)), 30, "the pages to come back on nobody's word")
    state, seen = blind.inspect(FREES), values(blind, FREES)
    assert state["unsound"] == 1 and seen["decode_deferred_kv_release_total", "unsound"] == 1
    assert seen["lease_closed_total", "unsound"] == 1
    log = (blind.run_dir / "workers.log").read_text()
    assert log.count("closed without proof") == 1 and "--on-hold-expiry=release" in log
    again = ask(blind, 1, GOOD, FREES)
    over(blind, again)
    assert again.tokens == oracle([prompt(1)])[0]
    blind.until(lambda: "1 leases were closed without proof" in blind.workers[FREES].cautions, 30, "word of it")


def test_too_much_retained_drains_the_worker_which_exits_with_75_and_its_successor_serves(
    blind: Cluster, oracle: Oracle
) -> None:
    running = ask(blind, 2, GOOD, HOLDS, answer=100)
    blind.until(lambda: len(running.tokens) > 2, 30, "an answer to be under way")
    first = ask(blind, 3, LOSING, HOLDS)
    over(blind, first)
    blind.until(lambda: blind.inspect(HOLDS)["pages"]["retained"] == 8, 30, "its pages to be retained")
    blind.until(
        lambda: "8 of 32 pages are retained: no proof could be had" in blind.workers[HOLDS].cautions, 30, "word of it"
    )
    blind.until_time(0.3)
    assert blind.workers[HOLDS].process.returncode is None, "a quarter of the pool is not above --max-retained"
    second = ask(blind, 4, LOSING, HOLDS)
    blind.workers[HOLDS].killed = True  # it may leave now
    over(blind, first, second)
    over(blind, running)
    assert running.tokens == oracle([prompt(2)], 100)[0], "who runs finishes first"
    assert blind.workers[HOLDS].process.wait(60) == EXIT_RETAINED
    assert "is retained without proof: draining, for a restart" in (blind.run_dir / "workers.log").read_text()

    blind.spawn("decode", HOLDS, Faults(proves=False))
    blind.wait_for(HOLDS)
    again = ask(blind, 4, GOOD, HOLDS)
    over(blind, again)
    assert again.tokens == oracle([prompt(4)])[0]
    for name in (HOLDS, GOOD):
        blind.until(lambda name=name: not not_idle(blind.inspect(name)), 30, f"{name} to be idle")  # type: ignore[misc]
