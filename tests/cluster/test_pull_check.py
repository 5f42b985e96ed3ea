"""The check after landing (guard L10), where it alone stands between a request and another tenant's prompt.

The operator has asked prefill to free without proof, its ABORTs are lost, and so are decode's PINGs: the pages that
are being read go to somebody else's prompt, whose KV is what lands.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.lossy import Mischief
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE, CONTEXT, PROMPT = 16, 160, 120
P, CHECKING, TRUSTING, OTHER = "prefill-0", "decode-0", "decode-1", "decode-2"
MANY = range(1, 400)
Oracle = Callable[..., list[list[int]]]
SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(8, 500) for _ in range(PROMPT)]


class Apart(Cluster):
    """A router that has not heard yet: one leg's failure does not end the other."""

    def give_up(self, request: LabRequest, reason: str) -> None:
        pass


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    sizes = {"page_size": PAGE, "chunked_prefill_size": 64, "max_running": 8, "context_length": CONTEXT}
    with (
        tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder,
        Apart(tiny, Path(folder), direction="pull", hold_timeout=20.0, max_total_tokens=512, **sizes) as cluster,
    ):
        deaf = tuple(Mischief("Abort", "drop", number) for number in MANY)
        mute = tuple(Mischief("Ping", "drop", number) for number in MANY)
        gate = str(cluster.run_dir / "gate")
        own = {"max_total_tokens": CONTEXT, "hold_timeout": 5.0, "on_hold_expiry": "release"}
        cluster.spawn("prefill", P, Faults(mischief=deaf), **own)
        cluster.spawn("decode", CHECKING, Faults(gate=gate, mischief=mute))
        cluster.spawn("decode", TRUSTING, Faults(gate=gate, mischief=mute, twin="unchecked reads"))
        cluster.spawn("decode", OTHER)
        cluster.wait_for(P, CHECKING, TRUSTING, OTHER)
        for name in (CHECKING, TRUSTING, OTHER):
            cluster.until_served(lambda name=name: cluster.start(prompt(0), SAMPLING, (P, name)))  # type: ignore[misc]
        yield cluster


def checks(cluster: Cluster) -> dict[str, float]:
    samples = [s for s in cluster.inspect(CHECKING)["samples"] if s.name == "quiesce:grant_checks_total"]
    return {dict(sample.labels)["outcome"]: sample.value for sample in samples}


def read_too_late(cluster: Cluster, decode: str, oracle: Oracle, seed: int = 1) -> LabRequest:
    """A read that takes its bytes when the pages are another prompt's already."""
    gate = cluster.run_dir / "gate"
    gate.touch()
    waived = cluster.inspect(P)["unsound"]
    late = cluster.start(prompt(seed), SAMPLING, (P, decode))
    cluster.until(lambda: cluster.inspect(decode)["posts"] == 1, 30, "the read")
    cluster.until(lambda: cluster.inspect(P)["unsound"] == waived + 1, 30, "prefill to free without proof")
    other = cluster.start(prompt(2), SAMPLING, (P, OTHER))
    cluster.until(lambda: other.over, 30, "the other prompt's answer")
    assert other.tokens == oracle([prompt(2)])[0]
    assert not late.ends.get(decode), "decode does not know"
    gate.unlink()
    cluster.until(lambda: late.over, 30, "the late read's end")
    return late


def test_l10_what_was_read_too_late_is_never_answered(cluster: Cluster, oracle: Oracle) -> None:
    before = checks(cluster)
    late = read_too_late(cluster, CHECKING, oracle)
    [end] = late.ends[CHECKING]
    assert end.outcome == "failed" and end.status == 502 and not late.tokens
    assert "taken back" in end.reason, end.reason
    assert checks(cluster) == {"in_force": before["in_force"], "ended": before["ended"] + 1}
    for name in (P, CHECKING, OTHER):
        cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")  # type: ignore[misc]


def test_scenario_a8_a_source_that_stopped_waiting_never_makes_a_wrong_answer(
    cluster: Cluster, oracle: Oracle
) -> None:
    """Prefill's hold has run out and it has served another prompt from the same pages when decode gets to read."""
    late = read_too_late(cluster, CHECKING, oracle, seed=11)
    [end] = late.ends[CHECKING]
    right = end.outcome == "length" and late.tokens == oracle([prompt(11)])[0]
    assert right or (end.status >= 500 and end.reason and not late.tokens)


def test_without_the_check_the_answer_is_about_another_prompt(cluster: Cluster, oracle: Oracle) -> None:
    """The same without it: if this went well, the test above could not fail."""
    late = read_too_late(cluster, TRUSTING, oracle)
    assert late.outcome == "length" and late.ends[TRUSTING][0].status == 200
    assert late.tokens != oracle([prompt(1)])[0]


def test_a_waiver_is_logged_and_counted_each_time_and_said_in_the_heartbeat(cluster: Cluster, oracle: Oracle) -> None:
    if not cluster.inspect(P)["unsound"]:  # each of the tests above leaves one
        read_too_late(cluster, CHECKING, oracle)
    state = cluster.inspect(P)
    waived = state["unsound"]
    assert waived > 0 and state["closed_by"]["unsound"] == waived
    samples = {(s.name, dict(s.labels).get("outcome")): s.value for s in state["samples"]}
    assert samples["quiesce:lease_closed_total", "unsound"] == waived
    log = (cluster.run_dir / "workers.log").read_text()
    assert log.count("--on-hold-expiry=release") == waived, log
