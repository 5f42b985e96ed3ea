"""What workers let in, what they refuse, and how they are asked whether they still work."""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiesce.core.messages import Ended, Sampling, Start
from quiesce.lab.cluster import ROUTER_EPOCH, Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIR = ("prefill-0", "decode-0")
PROMPT = list(range(10, 60))
LONG = [3 + i % 90 for i in range(300)]  # 19 pages of 16
LIMIT = 480
AT_ONCE = 1.0  # seconds, on any machine; what could be waited for takes longer
Oracle = Callable[..., list[list[int]]]


def ask(
    cluster: Cluster,
    prompt: Sequence[int] = PROMPT,
    workers: Sequence[str] = PAIR,
    tokens: int = 8,
    **fields: Any,
) -> LabRequest:
    request = LabRequest(secrets.token_hex(8), tuple(prompt), tuple(workers), time.monotonic())
    cluster.requests[request.rid] = request
    room = secrets.randbits(63)
    hand_off = not fields.get("probe") and not fields.get("local")
    for name in workers:
        peer = cluster.workers["prefill-0"].address if name.startswith("decode") and hand_off else None
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        start = Start(
            rid=request.rid,
            router_epoch=ROUTER_EPOCH,
            room=room,
            token_ids=request.prompt,
            sampling=sampling,
            deadline_ms=120_000,
            prefill=peer,
            **fields,
        )
        cluster._send(name, start)
    return request


def last_word(cluster: Cluster, request: LabRequest, name: str, seconds: float = 60.0) -> Ended:
    cluster.until(lambda: bool(request.ends.get(name)), seconds, f"{name} to end {request.rid}")
    return request.ends[name][0]


def as_idle_as(cluster: Cluster, before: dict[str, dict[str, Any]]) -> None:
    """A write that never ends may be there already."""
    known = {name: set(not_idle(state)) for name, state in before.items()}
    for name in PAIR:
        cluster.until(lambda name=name: set(not_idle(cluster.inspect(name))) <= known[name], 30, f"{name} to be idle")


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Cluster]:
    sizes = {"page_size": 16, "chunked_prefill_size": 64, "max_running": 8, "max_total_tokens": 1024}
    budgets = {"max_held": 0.6, "max_held_per_tenant": 0.5, "hold_timeout": 12.0, "max_retained": 0.9}
    budgets["context_length"] = LIMIT
    with (
        tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder,
        Cluster(tiny, Path(folder), **sizes, **budgets) as cluster,
    ):
        cluster.spawn("prefill", "prefill-0", Faults(stuck_write=1))
        cluster.spawn("decode", "decode-0")
        cluster.wait_for(*PAIR)
        yield cluster


def test_n6_a_probe_goes_through_each_worker_without_the_other_and_counts_nowhere(pair: Cluster) -> None:
    before = {name: pair.inspect(name) for name in PAIR}
    for name, other, outcome, tokens in (
        ("decode-0", "prefill-0", "length", 2),
        ("prefill-0", "decode-0", "handed_over", 0),
    ):
        pair.kill(other, signal.SIGSTOP)
        try:
            probe = ask(pair, [0], [name], tokens=2, probe=True)
            assert (last_word(pair, probe, name).outcome, len(probe.tokens)) == (outcome, tokens)
        finally:
            pair.kill(other, signal.SIGCONT)
    for _ in range(30):
        probes = [ask(pair, [0], [name], tokens=2, probe=True) for name in PAIR]
        for name, probe in zip(PAIR, probes, strict=True):
            last_word(pair, probe, name, 30)
    as_idle_as(pair, before)
    for name in PAIR:
        after = pair.inspect(name)
        assert after["steps"] > before[name]["steps"], "its engine took part"
        for unchanged in ("legs_started", "legs_ended", "prompt_tokens_computed", "faults", "fds", "threads"):
            assert after[unchanged] == before[name][unchanged], unchanged
        for remembered in ("records", "transfers"):
            assert after.get(remembered) == before[name].get(remembered), "nothing is remembered of them"


def test_d6_a_tenant_whose_holds_use_up_its_budget_is_refused_and_others_and_running_work_go_on(
    pair: Cluster, oracle: Oracle
) -> None:
    running = ask(pair, PROMPT, ["decode-0"], tokens=250, local=True, tenant="b")
    pair.until(lambda: bool(running.tokens), 30, "b's answer to begin")
    stuck = ask(pair, LONG, tenant="a")
    pair.until(lambda: pair.inspect("prefill-0")["posts"] > 0, 30, "the write that never ends")
    pair.kill("decode-0", signal.SIGSTOP)  # it hears of both in this order, and in one breath
    pair.cancel(stuck)
    at_once = ask(pair, tenant="a")
    pair.kill("decode-0", signal.SIGCONT)
    pair.until(lambda: pair.inspect("decode-0")["held_by_tenant"] == {"a": 19}, 30, "its pages to be held")
    assert (ended := last_word(pair, at_once, "decode-0")).outcome == "length", (
        "a burst of aborts refuses nobody",
        ended,
    )
    pair.until_time(1.2)
    refused = ask(pair, tenant="a")
    said = last_word(pair, refused, "decode-0")
    assert (said.outcome, said.status) == ("refused", 503)
    assert "19 pages of 1 ended requests of this API key" in said.reason
    assert not refused.tokens
    age = "quiesce:decode_deferred_kv_release_oldest_post_seconds"
    told = lambda: {s.name: s.value for s in pair.inspect("decode-0")["samples"]}[age]  # noqa: E731
    pair.until(lambda: told() > 1, 30, "prefill to say how long it is at it")
    other = ask(pair, tenant="b")
    assert (ended := last_word(pair, other, "decode-0")).outcome == "length", ended
    assert other.tokens == oracle([PROMPT], 8)[0]
    assert (ended := last_word(pair, running, "decode-0")).outcome == "length", ended
    assert running.tokens == oracle([PROMPT], 250)[0]
    # The fence at the hold timeout gives the pages back, with proof, and the tenant is let in again.
    pair.until(lambda: not pair.inspect("decode-0")["held_by_tenant"], 60, "the fence")
    samples = {s.name + str(dict(s.labels)): s.value for s in pair.inspect("decode-0")["samples"]}
    assert samples["quiesce:hold_budget_refusals_total{'budget': 'tenant'}"] == 1


def test_d1_d3_a_request_beyond_the_limit_is_refused_on_both_legs_at_once_and_enters_no_hand_off(
    pair: Cluster,
) -> None:
    before = pair.inspect("decode-0")["leases_opened"], pair.inspect("prefill-0")["leases_opened"]
    took = []
    for prompt, tokens in (([5] * LIMIT, 1), ([5] * (LIMIT - 8), 9), ([5] * 4000, 1), ([], 1)):
        began = time.monotonic()
        request = ask(pair, prompt, tokens=tokens)
        for name in PAIR:
            said = last_word(pair, request, name, 30)
            assert (said.outcome, said.status) == ("refused", 400)
            assert not prompt or str(LIMIT) in said.reason, "the limit is named"
        took.append(time.monotonic() - began)
    assert min(took) < AT_ONCE, "nothing is waited for"
    assert before == (pair.inspect("decode-0")["leases_opened"], pair.inspect("prefill-0")["leases_opened"])
    fits = ask(pair, [5] * (LIMIT - 8), ["decode-0"], tokens=8, local=True)
    assert (ended := last_word(pair, fits, "decode-0")).outcome == "length", ended


def test_d3_what_all_workers_have_agreed_on_refuses_both_legs_whatever_each_could_take(pair: Cluster) -> None:
    pair.limit = 200
    try:
        pair.until(lambda: all(pair.inspect(name)["agreed_limit"] == 200 for name in PAIR), 30, "both to be told")
        before = {name: pair.inspect(name)["leases_opened"] for name in PAIR}
        took = []
        for prompt, tokens in (([5] * 200, 1), ([5] * 193, 8), ([5] * 300, 4)):
            began = time.monotonic()
            request = ask(pair, prompt, tokens=tokens)
            for name in PAIR:
                said = last_word(pair, request, name, 30)
                assert (said.outcome, said.status) == ("refused", 400)
                assert "limit is 200" in said.reason or "limit of 200" in said.reason
            took.append(time.monotonic() - began)
        assert min(took) < AT_ONCE, "nothing is waited for"
        assert before == {name: pair.inspect(name)["leases_opened"] for name in PAIR}
        if not pair.inspect("prefill-0")["posts"]:  # by itself: the first write, which never ends, is yet to come
            first = ask(pair, PROMPT)
            pair.until(lambda: pair.inspect("prefill-0")["posts"] > 0, 30, "the write that never ends")
            pair.cancel(first)
        fits = ask(pair, [5] * 192, tokens=8)
        assert (ended := last_word(pair, fits, "decode-0")).outcome == "length", ended
    finally:
        pair.limit = 0
        pair.until(lambda: all(pair.inspect(name)["agreed_limit"] == 0 for name in PAIR), 30, "both to be told")


def test_an_answer_that_was_begun_elsewhere_goes_on_exactly(pair: Cluster, oracle: Oracle) -> None:
    """Penalties, seed, minimum and grammar see prompt and answer where they were, whoever computes them."""
    whole = oracle([PROMPT], 12)[0]
    for given in (1, 5, 11):
        request = ask(pair, [*PROMPT, *whole[:given]], ["decode-0"], tokens=12, local=True, resumed=given)
        ended = last_word(pair, request, "decode-0")
        assert (ended.outcome, ended.prompt_tokens, ended.completion_tokens) == ("length", len(PROMPT), 12 - given)
        assert whole[:given] + request.tokens == whole
    for given in (12, 13):  # nothing is left of it
        request = ask(pair, [*PROMPT, *whole, 5], ["decode-0"], tokens=12, local=True, resumed=given)
        assert last_word(pair, request, "decode-0").status == 400
    pair.until(lambda: not not_idle(pair.inspect("decode-0")), 30, "decode to be idle")
