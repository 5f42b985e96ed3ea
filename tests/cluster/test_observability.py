"""What real workers say of themselves: metrics, the history of a page, one log line a request, and no secret."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrics_doc import documented
from quiesce.channel import KeyPair
from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = 16
WORKERS = ("prefill-0", "decode-0")
QUEUES = {
    "prefill-0": ("num_queue_reqs",),
    "decode-0": ("num_queue_reqs", "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
}


@pytest.fixture
def pair(tiny: Path, run_dir: Path) -> Iterator[Cluster]:
    sizes = {"page_size": PAGE, "chunked_prefill_size": 64, "context_length": 144, "max_total_tokens": 2048}
    with Cluster(tiny, run_dir, log_format="json", log_level="debug", **sizes) as cluster:
        faults = Faults(ms_per_page=(5.0, 5.0), gate=str(run_dir / "gate"))
        cluster.spawn("prefill", "prefill-0", faults, max_running=2)
        cluster.spawn("decode", "decode-0", max_running=1)
        cluster.wait_for(*WORKERS)
        yield cluster


def metric(state: dict[str, Any], name: str, **labels: str) -> float:
    """The sum over the labels that are not given."""
    found = [
        sample.value
        for sample in state["samples"]
        if sample.name == f"quiesce:{name}" and labels.items() <= dict(sample.labels).items()
    ]
    assert found, f"{name} {labels} is not exported"
    return float(sum(found))


def gauges(state: dict[str, Any]) -> dict[str, float]:
    return {
        f"{sample.name} {dict(sample.labels)}": sample.value for sample in state["samples"] if sample.kind == "gauge"
    }


def prompts(count: int, tokens: int) -> list[list[int]]:
    draw = random.Random(106)
    return [[draw.randrange(3, 250) for _ in range(tokens)] for _ in range(count)]


def log_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "workers.log").read_text("utf-8").splitlines() if line[:1] == "{"]


def idle(cluster: Cluster) -> None:
    for name in WORKERS:
        cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")


def test_g106_g107_counters_queues_and_the_log_tell_what_happened(pair: Cluster, run_dir: Path) -> None:
    asked = prompts(10, 100)
    before = {name: pair.inspect(name) for name in WORKERS}
    exported = {
        (sample.name.removeprefix("quiesce:"), sample.kind)
        for state in before.values()
        for sample in state["samples"]
    }
    assert exported == documented("Workers"), "docs/metrics.md lists what workers export, from their start"
    gate = run_dir / "gate"
    gate.touch()  # until all queues have been seen
    requests = [pair.start(prompt, Sampling(max_tokens=5, ignore_eos=True), WORKERS) for prompt in asked]
    empty = {(name, queue) for name in WORKERS for queue in QUEUES[name]}

    def look() -> None:
        for name in WORKERS:
            state = pair.inspect(name)
            assert min(gauges(state).values()) >= 0, gauges(state)
            empty.difference_update({(name, queue) for queue in QUEUES[name] if metric(state, queue) > 0})

    started = time.monotonic()
    while empty:
        look()
        assert time.monotonic() - started < 30, f"nobody is in {empty}"
    gate.unlink()
    while not all(request.over for request in requests):
        look()
        assert time.monotonic() - started < 90
    idle(pair)
    prefill, decode = (pair.inspect(name) for name in WORKERS)

    # G106: what prefill computes, decode receives; it computes no prompt itself.
    assert metric(prefill, "prompt_tokens_computed_total") == 1000
    assert metric(decode, "prompt_tokens_computed_total") == 0
    assert metric(decode, "prompt_tokens_received_total") == 1000
    assert metric(decode, "tokens_sent_total") == 50
    page_mb = metric(decode, "kv_transfer_total_mb_sum") / 10 / 7  # 100 tokens are 7 pages
    assert page_mb == pytest.approx(metric(prefill, "kv_transfer_total_mb_sum") / 70)
    assert metric(prefill, "kv_transfer_latency_ms_count") == metric(decode, "kv_transfer_latency_ms_count") == 10

    # G107: every queue was seen with somebody in it, none is left, and what started has ended.
    for state in (prefill, decode):
        busy = {name: value for name, value in gauges(state).items() if value and "'state': 'free'" not in name}
        assert not busy
        assert metric(state, "requests_started_total") == metric(state, "requests_ended_total") == 10
    assert metric(decode, "requests_ended_total", outcome="length") == 10
    assert metric(prefill, "requests_ended_total", outcome="handed_over") == 10
    assert metric(decode, "queue_time_seconds_count") == 10

    lines = log_lines(run_dir)
    for name, outcome, tokens in (("decode-0", "length", 5), ("prefill-0", "handed_over", 0)):
        ends = {line["rid"]: line for line in lines if line["process"] == name and "outcome" in line}
        assert ends.keys() == {request.rid for request in requests}
        for line in ends.values():
            assert (line["outcome"], line["prompt_tokens"], line["completion_tokens"]) == (outcome, 100, tokens)
            assert line["level"] == "info" and re.fullmatch(r"[0-9a-f]{16}\.\d+", line["transfer"])
            assert 0 <= line["queue_ms"] <= line["total_ms"] and 0 < line["transfer_ms"] <= line["total_ms"]
            assert line["room"].isdecimal()
    epochs = {line["process"]: line["peer_epoch"] for line in lines if "outcome" in line}
    assert epochs == {"decode-0": prefill["epoch"], "prefill-0": decode["epoch"]}
    assert all(line["process"] in WORKERS for line in lines)


def test_the_ownership_log_tells_who_held_a_page_after_the_client_left(pair: Cluster, run_dir: Path) -> None:
    gate = run_dir / "gate"
    gate.touch()
    first, second = (
        pair.start(prompt, Sampling(max_tokens=5, ignore_eos=True), WORKERS) for prompt in prompts(2, 128)
    )
    pair.until(lambda: pair.inspect("decode-0")["transfers"].get("offered", 0) > 0, 30, "a transfer under way")
    pair.cancel(first)
    pair.until(lambda: pair.inspect("decode-0")["transfers"].get("holding", 0) > 0, 30, "its pages to be held")
    gate.unlink()
    pair.until(lambda: first.over and second.over, 60, "both to end")
    idle(pair)
    decode = pair.inspect("decode-0")
    assert metric(decode, "decode_deferred_kv_release_seconds_count") == 1
    assert metric(decode, "decode_deferred_kv_release_total") == 1
    assert metric(decode, "decode_abort_answer_seconds_count") == 1

    histories = [pair.inspect("decode-0", page=page) for page in range(2048 // PAGE)]
    mine = [h for h in histories if any(entry["rid"] == first.rid for entry in h["entries"])]
    assert len(mine) == 8, "128 tokens are 8 pages"
    for history in mine:
        told = [entry for entry in history["entries"] if entry["rid"] == first.rid]
        assert [entry["event"] for entry in told] == ["owned", "lent", "ended", "closed", "returned"]
        assert {entry["transfer"] for entry in told} == {told[0]["transfer"]}
        assert told[1]["peer_epoch"] == f"{pair.workers['prefill-0'].address.epoch:016x}"  # type: ignore[union-attr]
        assert told[3]["proof"] in ("drained", "never_started", "completed")
        assert [entry["at"] for entry in told] == sorted(entry["at"] for entry in told)
        assert history["name"] == "decode-0" and history["entries_forgotten"] == 0
    assert "error" in pair.inspect("decode-0", page=2048 // PAGE)
    sources = [pair.inspect("prefill-0", page=page)["entries"] for page in range(2048 // PAGE)]
    assert any(entry["rid"] == second.rid and entry.get("lease") == "read" for told in sources for entry in told)


def test_no_secret_and_no_prompt_is_logged_even_at_debug(pair: Cluster, run_dir: Path) -> None:
    (prompt,) = prompts(1, 100)
    request = pair.start(prompt, Sampling(max_tokens=2, ignore_eos=True), WORKERS)
    pair.until(lambda: request.over, 60, "it to end")
    idle(pair)
    text = (run_dir / "workers.log").read_text("utf-8")
    assert request.rid in text, "the log has something in it"
    for key in (run_dir / "keys").glob("*.key"):
        assert KeyPair.load(key).secret not in text, f"the secret of {key.name} is in the log"
    assert ", ".join(map(str, prompt[:4])) not in text and ",".join(map(str, prompt[:4])) not in text
