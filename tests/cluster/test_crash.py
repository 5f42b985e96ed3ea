"""A worker is killed at work: who waits hears soon, nobody else restarts, the next answer is right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = list(range(10, 130))
HEARD_WITHIN = 30.0  # seconds, on any machine; the deadline of a request is a minute
PAIR = ("prefill-0", "decode-0")


@pytest.fixture
def pair(tiny: Path, run_dir: Path) -> Iterator[Cluster]:
    """One prefill whose writes wait while there is a gate, one decode whose steps wait while there is a pause."""
    with Cluster(
        tiny, run_dir, page_size=16, chunked_prefill_size=64, max_running=8, max_total_tokens=1024, hold_timeout=5.0
    ) as cluster:
        cluster.spawn("prefill", "prefill-0", Faults(gate=str(run_dir / "gate")))
        cluster.spawn("decode", "decode-0", Faults(pause=str(run_dir / "pause")))
        cluster.wait_for(*PAIR)
        yield cluster


def ask(cluster: Cluster, tokens: int = 12) -> LabRequest:
    return cluster.start(PROMPT, Sampling(max_tokens=tokens, ignore_eos=True), PAIR)


@contextlib.contextmanager
def asked(cluster: Cluster, state: str, tokens: int) -> Iterator[LabRequest]:
    """A request that stays in this state: the decode worker's one transfer, or its batch."""
    gate = cluster.run_dir / ("gate" if state == "offered" else "pause")
    gate.touch()
    request = ask(cluster, tokens)

    def reached() -> bool:
        seen = cluster.inspect("decode-0")
        return bool(seen["running"]) if state == "decoding" else state in seen["transfers"]

    cluster.until(reached, 30, f"a transfer to be {state}")
    try:
        yield request
    finally:
        gate.unlink(missing_ok=True)


@pytest.mark.parametrize("state", ["offered", "decoding"])
def test_prefill_killed(pair: Cluster, oracle: Callable[..., list[list[int]]], state: str) -> None:
    decode_before = pair.inspect("decode-0")
    with asked(pair, state, 200) as request:
        pair.kill("prefill-0")
    if state == "offered":
        pair.until(lambda: request.outcome is not None, HEARD_WITHIN, "the decode leg to end")
        assert request.outcome == "failed"
    else:  # its pages are here already: the answer does not need prefill any more
        pair.until(lambda: request.outcome is not None, 60, "the answer")
        assert request.outcome == "length"
        assert request.tokens == oracle([PROMPT], 200)[0]
    pair.until(lambda: not not_idle(pair.inspect("decode-0")), 30, "decode to be idle")
    after = pair.inspect("decode-0")
    assert after["epoch"] == decode_before["epoch"], "decode did not restart"
    if state == "offered":
        assert after["closed_by"].get("gone", 0) + after["closed_by"].get("fenced", 0) == 1, (
            "closed by proof of death"
        )

    pair.spawn("prefill", "prefill-0")
    pair.wait_for("prefill-0")
    again = ask(pair)
    pair.until(lambda: again.over, 30, "the next answer")
    assert again.tokens == oracle([PROMPT])[0]


@pytest.mark.parametrize("state", ["offered", "decoding"])
def test_decode_killed(pair: Cluster, oracle: Callable[..., list[list[int]]], state: str) -> None:
    prefill_before = pair.inspect("prefill-0")
    with asked(pair, state, 200) as request:
        pair.kill("decode-0")
    if state == "offered":
        pair.until(lambda: bool(request.ends.get("prefill-0")), HEARD_WITHIN, "the prefill leg to end")
        assert request.ends["prefill-0"][0].outcome == "failed"
    pair.until(lambda: not not_idle(pair.inspect("prefill-0")), 30, "prefill to be idle")
    assert pair.inspect("prefill-0")["epoch"] == prefill_before["epoch"], "prefill did not restart"

    pair.spawn("decode", "decode-0")
    pair.wait_for("decode-0")
    again = ask(pair)
    pair.until(lambda: again.over, 30, "the next answer")
    assert again.tokens == oracle([PROMPT])[0]
    pair.until(lambda: not not_idle(pair.inspect("prefill-0")), 30, "prefill to be idle")
