"""A worker fails a request: what is tried again, where, and what the client sees of it, which is nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quiesce.api.chat import TextModel
from quiesce.router.attempts import RETRY_BURST, RetryBudget
from quiesce.router.breaker import Breaker, BreakerRules
from router.cluster import Cluster, FakeWorker, body, cluster, until

pytestmark = pytest.mark.anyio

TWO_AND_TWO = [{"role": "prefill", "hold": True}] * 2 + [{"role": "decode", "hold": True}] * 2
ONE_AND_TWO = [{"role": "prefill"}, {"role": "decode", "hold": True}, {"role": "decode", "hold": True}]


def holder(c: Cluster, role: str) -> FakeWorker | None:
    """The worker that has a leg now."""
    return next((worker for worker in c.workers if worker.role == role and worker.alive and worker.active), None)


def dies(c: Cluster, worker: FakeWorker) -> None:
    worker.kill()
    c.exited(worker)


def reading(answer: httpx.Response) -> tuple[str, dict[str, Any] | None]:
    """Text and usage of a streamed chat."""
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", []))
    return text, next((event["usage"] for event in events if event.get("usage")), None)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_a_dead_worker_costs_another_attempt(
    tmp_path: Path, text: TextModel, victim: str, stream: bool
) -> None:
    async with cluster(tmp_path, text, TWO_AND_TWO) as c:
        waiting = asyncio.create_task(c.chat(stream=stream))
        first_p = await until(lambda: holder(c, "prefill"))
        first_d = await until(lambda: holder(c, "decode"))
        (first,) = first_d.starts.values()
        dead, other = (first_p, first_d) if victim == "prefill" else (first_d, first_p)
        dies(c, dead)
        await until(lambda: other.cancels)
        rid = f"{first.rid}.2"
        deciders = [worker for worker in c.workers if worker.role == "decode"]
        again = await until(lambda: next((w.starts[rid] for w in deciders if rid in w.starts), None))
        assert again.room != first.room and again.token_ids == first.token_ids and not again.resumed
        assert victim == "decode" or again.prefill != first.prefill
        for worker in c.workers:
            if worker.alive:
                worker.hold = False
                for rid in list(worker.active):
                    worker.answer(worker.starts[rid])
        answer = await waiting
        assert answer.status_code == 200 and ("[DONE]" in answer.text or not stream)
        counters = c.router.dispatcher.counters()
        assert (counters["retries"], counters["failovers"]) == (1, 0)
        await c.idle()
        assert counters["answers_started"] == 1 == c.router.dispatcher.counters()["answers_ended"]


async def test_a_busy_worker_is_no_reason_to_refuse_while_another_has_room(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, [*ONE_AND_TWO]) as c:
        waiting = asyncio.create_task(c.chat())
        full = await until(lambda: holder(c, "decode"))
        other = next(worker for worker in c.workers if worker.role == "decode" and worker is not full)
        other.hold = False
        full.end(next(iter(full.active)), "refused", 503, "decode-0 has 512 requests, its limit")
        assert (await waiting).status_code == 200 and len(other.starts) == 1
        await c.idle()


async def test_a_leg_that_was_late_blames_no_worker_and_is_sent_again_to_the_only_ones_there_are(
    tmp_path: Path, text: TextModel
) -> None:
    workers = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers, breaker_failures=1) as c:
        waiting = asyncio.create_task(c.chat())
        rid = await until(lambda: next(iter(c.decode.active), None))
        await until(lambda: c.prefill.active)
        c.prefill.hold = c.decode.hold = False
        c.decode.end(rid, "failed", 502, "the hand-off failed: no request for room 7 arrived within 2 s", "router")
        assert (await waiting).status_code == 200
        assert c.router.dispatcher.counters()["retries"] == 1
        await c.idle()


@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (409, "failed"), (500, "failed"), (504, "failed")])
async def test_what_another_worker_would_meet_too_is_not_tried_again(
    tmp_path: Path, text: TextModel, status: int, outcome: str
) -> None:
    async with cluster(tmp_path, text, ONE_AND_TWO) as c:
        waiting = asyncio.create_task(c.chat())
        worker = await until(lambda: holder(c, "decode"))
        worker.end(next(iter(worker.active)), outcome, status, "no")
        assert (await waiting).status_code == status
        assert sum(len(w.starts) for w in c.workers if w.role == "decode") == 1
        await c.idle()


async def half_then_dead(c: Cluster, given: int, **fields: Any) -> tuple[FakeWorker, FakeWorker, asyncio.Task[Any]]:
    """A stream of four tokens whose worker gives some and dies."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    waiting = asyncio.create_task(c.chat(**(stream | fields)))
    worker = await until(lambda: holder(c, "decode"))
    other = next(w for w in c.workers if w.role == "decode" and w is not worker)
    (rid,) = worker.active
    worker.tokens(rid, *(40 + i for i in range(given)))
    await until(lambda: c.router.dispatcher._calls[rid].machine.tokens == given)
    dies(c, worker)
    return worker, other, waiting


ALL = lambda start: (40, 41, 42, 43)  # noqa: E731


async def test_scenario_r103_an_answer_goes_on_at_another_worker_without_a_seam(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, [*ONE_AND_TWO]) as c:
        for worker in c.workers:
            worker.reply = ALL
        for worker in c.workers[1:]:
            worker.cached_tokens = 1000  # as a worker would that finds prompt and answer in a cache
        fields = {"temperature": 0, "logprobs": True, "presence_penalty": 0.5, "min_tokens": 3}
        dead, other, waiting = await half_then_dead(c, 2, **fields)
        await until(lambda: other.active)
        (first,), (second,) = dead.starts.values(), other.starts.values()
        assert second.token_ids == (*first.token_ids, 40, 41) and second.resumed == 2
        assert second.sampling == first.sampling and second.room != first.room
        other.answer(second)
        shown, usage = reading(await waiting)
        assert shown == text._tokenizer.decode([40, 41, 42, 43])
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(first.token_ids), 4)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        assert c.router.dispatcher.counters()["failovers"] == 1
        await c.idle()


@pytest.mark.parametrize(
    ("failover", "fields", "goes_on"),
    [
        ("exact", {"temperature": 1.0}, False),
        ("exact", {"temperature": 1.0, "seed": 5}, True),
        ("exact", {"temperature": 0}, True),
        ("always", {"temperature": 1.0}, True),
        ("never", {"temperature": 0}, False),
    ],
)
async def test_which_answers_go_on_is_the_operators_choice(
    tmp_path: Path, text: TextModel, failover: str, fields: dict[str, Any], goes_on: bool
) -> None:
    async with cluster(tmp_path, text, ONE_AND_TWO, failover=failover) as c:
        for worker in c.workers:
            worker.reply = ALL
        _, other, waiting = await half_then_dead(c, 2, **fields)
        other.hold = False
        if goes_on:
            start = await until(lambda: next(iter(other.starts.values()), None))
            if start.rid in other.active:
                other.answer(start)
            assert "[DONE]" in (await waiting).text
        else:
            answer = await asyncio.wait_for(waiting, 20)  # long before its deadline
            assert "[DONE]" not in answer.text and '"error"' in answer.text
            assert not other.starts
        await c.idle()


async def test_an_answer_whose_last_word_was_lost_is_whole(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, ONE_AND_TWO, failover="never") as c:
        _, other, waiting = await half_then_dead(c, 4)
        assert "[DONE]" in (await waiting).text and not other.starts
        await c.idle()


async def test_a_client_that_leaves_between_two_attempts_is_not_served(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, ONE_AND_TWO) as c:
        giving = asyncio.create_task(c.chat(temperature=0))
        worker = await until(lambda: holder(c, "decode"))
        other = next(w for w in c.workers if w.role == "decode" and w is not worker)
        worker.kill()  # nobody says that it is dead: its leg may still run
        await until(lambda: any(call.pending for call in c.router.dispatcher._calls.values()))
        giving.cancel()
        await until(lambda: not c.router.front.inflight)
        c.exited(worker)
        await c.idle()
        assert not other.starts


def test_retries_never_become_the_load() -> None:
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(100)) == RETRY_BURST
    for _ in range(100):
        budget.request()
    assert 9 <= sum(budget.take() for _ in range(100)) <= 10


# ------------------------------------------------------------ circuit breakers


def test_a_breaker_opens_tries_one_request_and_closes_again() -> None:
    breaker = Breaker(BreakerRules(failures=3, seconds=5.0))
    for prompt in range(3):
        assert breaker.trouble(0.0) is None
        breaker.failed(f"r{prompt}", prompt, 0.0)
    assert breaker.trouble(4.9) and breaker.opened == 1
    assert breaker.trouble(5.1) is None
    breaker.begin("trial")
    assert breaker.trouble(5.1)  # one at a time
    breaker.succeeded("before")  # a request from before it opened proves nothing
    assert breaker.trouble(5.1)
    breaker.over("trial")  # its client left: nothing was learnt
    assert breaker.trouble(5.1) is None
    breaker.begin("second")
    breaker.failed("second", 9, 5.2)
    assert breaker.trouble(5.3) and breaker.trouble(10.3) is None
    breaker.begin("third")
    breaker.succeeded("third")
    breaker.over("third")
    assert breaker.trouble(10.3) is None
    breaker.failed("r", 1, 11.0)
    assert breaker.trouble(11.0) is None  # the count began anew


async def test_scenario_d43_an_open_breaker_of_one_member_stops_both(tmp_path: Path, text: TextModel) -> None:
    workers = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers, breaker_failures=3, breaker_seconds=600.0) as c:
        for i in range(3):
            waiting = asyncio.create_task(c.chat(messages=[{"role": "user", "content": f"prompt {i}"}]))
            rid = await until(lambda: next(iter(c.decode.active), None))
            await until(lambda: c.prefill.active)
            # Decode says it first, and says that it was not its own fault.
            c.decode.end(rid, "failed", 502, "the hand-off failed: prefill broke", "peer")
            assert (await waiting).status_code == 502
            await c.idle()
        before = len(c.decode.starts)
        answer = await c.chat()
        assert answer.status_code == 503 and answer.headers["retry-after"] and len(c.decode.starts) == before
        detail = (await c.client.get("/health")).json()
        troubles = {worker["name"]: worker["trouble"] for worker in detail["workers"]}
        assert "tried again" in troubles["prefill-0"] and troubles["decode-0"] is None
        c.prefill.hold = c.decode.hold = False
        c.router.dispatcher.registry.workers["prefill-0"].breaker._until = 0.0  # its time is over
        assert (await c.chat()).status_code == 200
        await c.usable()  # prefill's own word, that it went well, may come later than the answer
        assert [(await c.chat()).status_code for _ in range(5)] == [200] * 5
        assert c.router.dispatcher.counters()["breakers_opened"] == 1


async def test_scenario_d44_neither_bad_requests_nor_one_poisonous_prompt_open_a_breaker(
    tmp_path: Path, text: TextModel
) -> None:
    workers = [{"role": "prefill"}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers, breaker_failures=3, breaker_seconds=60.0) as c:
        for i in range(12):
            refused = i % 2 == 0
            content = f"prompt {i}" if refused else "the same one"
            waiting = asyncio.create_task(c.chat(messages=[{"role": "user", "content": content}]))
            rid = await until(lambda: next(iter(c.decode.active), None))
            c.decode.end(
                rid, "refused" if refused else "failed", 400 if refused else 500, "no", "" if refused else "self"
            )
            assert (await waiting).status_code == (400 if refused else 500)
        c.decode.hold = False
        assert (await c.chat()).status_code == 200


# ------------------------------------------------------------ who is chosen


async def starts_of(c: Cluster, count: int) -> dict[str, int]:
    def starts(role: str) -> int:
        return sum(len(worker.starts) for worker in c.workers if worker.role == role)

    await until(lambda: starts("prefill") == starts("decode"))
    before = {worker.name: len(worker.starts) for worker in c.workers}
    for _ in range(count):
        assert (await c.chat()).status_code == 200
    await until(lambda: starts("prefill") == starts("decode"))  # decode may answer before prefill has heard
    return {worker.name: len(worker.starts) - before[worker.name] for worker in c.workers}


async def test_least_loaded_goes_by_what_waits_and_round_robin_by_turns(tmp_path: Path, text: TextModel) -> None:
    workers = [{"role": "prefill"}, {"role": "prefill", "reported": {"waiting_tokens": 5000}}, {"role": "decode"}]
    async with cluster(tmp_path / "a", text, workers) as c:
        assert await starts_of(c, 6) == {"prefill-0": 6, "prefill-1": 0, "decode-0": 6}
    async with cluster(tmp_path / "b", text, workers, policy="round-robin") as c:
        assert await starts_of(c, 6) == {"prefill-0": 3, "prefill-1": 3, "decode-0": 6}


async def test_a_worker_that_drains_gets_nothing_new_and_finishes_what_it_has(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, ONE_AND_TWO) as c:
        waiting = asyncio.create_task(c.chat(max_tokens=1))
        leaving = await until(lambda: holder(c, "decode"))
        other = next(w for w in c.workers if w.role == "decode" and w is not leaving)
        leaving.reported = {"draining": True}
        await until(lambda: c.router.dispatcher.registry.workers[leaving.name].latest.draining)
        other.hold = False
        assert (await starts_of(c, 3))[other.name] == 3
        leaving.answer(next(iter(leaving.starts.values())))
        assert (await waiting).status_code == 200


async def test_short_prompts_are_computed_on_decode_where_that_is_asked_for_and_allowed(
    tmp_path: Path, text: TextModel
) -> None:
    short = {"model": "tiny", "prompt": [5] * 7, "max_tokens": 2, "logprobs": 1, "echo": True}
    async with cluster(tmp_path / "a", text, local_prefill_below=8) as c:
        assert (await c.client.post("/v1/completions", json=short)).status_code == 200
        (start,) = c.decode.starts.values()
        assert start.local and start.prefill is None and not c.prefill.starts
        long = short | {"prompt": [5] * 8}
        assert (await c.client.post("/v1/completions", json=long)).status_code == 200
        await until(lambda: len(c.prefill.starts) == 1)  # decode may answer before prefill has heard
        assert [s.local for s in c.decode.starts.values()] == [True, False]
    strict = [{"role": "prefill"}, {"role": "decode", "reported": {"local_prefill": False}}]
    async with cluster(tmp_path / "b", text, strict, local_prefill_below=8) as c:
        assert (await c.client.post("/v1/completions", json=short)).status_code == 200
        await until(lambda: len(c.prefill.starts) == 1)
    async with cluster(tmp_path / "c", text) as c:  # off by default
        assert (await c.chat(**body())).status_code == 200
        await until(lambda: len(c.prefill.starts) == 1)
