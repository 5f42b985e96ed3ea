"""Workers that die, restart or fall silent under running requests, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quiesce.api.chat import TextModel
from quiesce.router.registry import Patience
from router.cluster import cluster, until

pytestmark = pytest.mark.anyio

LONG_BEFORE_ITS_DEADLINE = 20.0  # seconds; of a request it is minutes
HELD = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_worker_that_dies_ends_its_requests_at_once_and_the_other_leg_too(
    tmp_path: Path, text: TextModel, victim: str
) -> None:
    async with cluster(tmp_path, text, HELD) as c:
        waiting = asyncio.create_task(c.chat())
        rid = await until(lambda: next(iter(c.worker(victim).active), None))
        survivor = c.decode if victim == "prefill-0" else c.prefill
        await until(lambda: rid in survivor.active)
        dead = c.worker(victim)
        dead.kill()
        answer = await asyncio.wait_for(waiting, LONG_BEFORE_ITS_DEADLINE)
        assert answer.status_code == 502 and victim in answer.json()["error"]["message"]
        await until(lambda: survivor.cancels)
        # The other one needs no restart; a new process under the old name is enough.
        c.exited(dead)
        await until(lambda: victim not in c.router.dispatcher.registry.workers)
        await c.idle()
        assert (await c.client.get("/health")).status_code == 503
        answer = await c.chat()
        assert answer.status_code == 503 and answer.headers["retry-after"]
        survivor.hold = False
        await c.add(dead.role, victim)
        await c.usable()
        assert (await c.chat()).status_code == 200
        await c.idle()


async def test_a_new_epoch_under_the_same_name_ends_the_legs_of_the_old_one(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text, HELD) as c:
        waiting = asyncio.create_task(c.chat())
        await until(lambda: c.decode.active)
        c.decode.silent = True  # hung: its sockets stay open
        await c.add("decode", "decode-0")
        answer = await waiting
        assert answer.status_code == 502 and "replaced by a new process" in answer.json()["error"]["message"]
        await c.idle()
        c.prefill.hold = False
        await c.usable()
        assert (await c.chat()).status_code == 200


async def test_scenario_d22_requests_of_a_stopped_worker_wait_for_the_hold_timeout_and_late_ones_are_told_at_once(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, [{"role": "prefill"}, {"role": "decode", "hold": True}]) as c:
        streaming = asyncio.create_task(c.chat(stream=True, max_tokens=2))
        rid = await until(lambda: next(iter(c.decode.active), None))
        c.decode.tokens(rid, 40)
        await until(lambda: c.router.dispatcher._calls[rid].machine.tokens == 1)
        waiting = [asyncio.create_task(c.chat()) for _ in range(8)]
        await until(lambda: len(c.decode.active) == 9)
        c.router.dispatcher.registry.patience = Patience(silent=0.8, lost=6.0)
        c.decode.silent = True
        await until(lambda: not c.router.dispatcher.health()[0])
        late = await c.chat()
        assert late.status_code == 503 and late.headers["retry-after"]
        assert not any(w.done() for w in waiting)  # silent, not dead: they wait
        c.decode.silent = False
        c.decode.tokens(rid, 40)
        c.decode.end(rid, "length")
        assert "[DONE]" in (await streaming).text
        await c.usable()
        assert not any(w.done() for w in waiting)
        c.decode.silent = True  # and now for longer than that
        answers = await asyncio.wait_for(asyncio.gather(*waiting), LONG_BEFORE_ITS_DEADLINE)
        assert {answer.status_code for answer in answers} == {502}
        await until(lambda: len(c.prefill.starts) == 9)
        await c.idle()
        c.decode.silent = c.decode.hold = False
        await c.usable()
        assert (await c.chat()).status_code == 200


async def test_scenario_d44_bad_prompts_do_not_make_workers_unavailable(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text) as c:
        for _ in range(20):
            answer = await c.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 600})
            assert answer.status_code == 400
        assert (await c.chat()).status_code == 200


async def test_scenario_d97_a_request_that_may_have_started_is_never_sent_again(
    tmp_path: Path, text: TextModel
) -> None:
    workers = [{"role": "prefill"}, {"role": "decode", "hold": True}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers) as c:
        waiting = [asyncio.create_task(c.chat()) for _ in range(20)]
        first, second = c.worker("decode-0"), c.worker("decode-1")
        await until(lambda: len(first.active) + len(second.active) == 20 or any(w.done() for w in waiting))
        assert [(await w).text for w in waiting if w.done()] == []
        lost = len(first.active)  # about half of them: a heartbeat that comes meanwhile shifts the weights
        assert 0 < lost < 20
        first.kill()
        await until(lambda: sum(w.done() for w in waiting) == lost)
        assert len(second.starts) == 20 - lost and not set(first.starts) & set(second.starts)
        second.kill()
        assert {(await w).status_code for w in waiting} == {502}


async def test_tokens_from_a_worker_that_has_no_part_in_a_request_are_ignored(
    tmp_path: Path, text: TextModel
) -> None:
    workers = [{"role": "prefill"}, {"role": "decode", "hold": True}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers) as c:
        waiting = asyncio.create_task(c.chat(max_tokens=1))
        await until(lambda: c.worker("decode-0").active or c.worker("decode-1").active)
        right, wrong = c.worker("decode-0"), c.worker("decode-1")
        if wrong.active:
            right, wrong = wrong, right
        rid = next(iter(right.active))
        other = asyncio.create_task(c.chat(max_tokens=1))
        router = await until(lambda: next(iter(wrong.active.values()), None))
        wrong.active[rid], wrong.counts[rid], wrong.starts[rid] = router, 0, right.starts[rid]
        wrong.tokens(rid, 50)
        wrong.end(rid, "length")
        await until(lambda: c.router.dispatcher.counters()["stray_messages"] == 2)
        for worker in (right, wrong):
            for running in list(worker.active):
                worker.tokens(running, 40)
                worker.end(running, "length")
        for answer in (await waiting, await other):
            assert answer.json()["choices"][0]["message"]["content"] == text._tokenizer.decode([40])


async def test_a_worker_that_was_refused_is_not_told_that_it_is_in(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text) as c:
        dead = c.decode
        assert dead.router_epochs == {c.router.dispatcher.epoch}
        c.exited(dead)
        await until(lambda: "decode-0" not in c.router.dispatcher.registry.workers)
        refused = c.router.dispatcher.registry.refused
        await until(lambda: c.router.dispatcher.registry.refused > refused + 3)  # a welcome may be on its way
        dead.router_epochs.clear()
        await until(lambda: c.router.dispatcher.registry.refused > refused + 7)
        assert not dead.router_epochs


async def test_scenario_k13_a_name_is_registered_with_its_own_key_alone(tmp_path: Path, text: TextModel) -> None:
    async with cluster(tmp_path, text) as c:
        right = c.decode.endpoint
        assert c.workers[1] is c.decode
        thief = await c.add("decode", "decode-1")
        thief.name = "decode-0"  # the place of another, with its own key
        await until(lambda: c.router.dispatcher.counters()["registrations_misnamed"] > 1)
        known = c.router.dispatcher.registry.workers["decode-0"]
        assert known.latest.address.endpoint == right
        owner = c.workers[1]
        owner.kill()
        c.exited(owner)
        await until(lambda: "decode-0" not in c.router.dispatcher.registry.workers)
        seen = c.router.dispatcher.counters()["registrations_misnamed"]
        await until(lambda: c.router.dispatcher.counters()["registrations_misnamed"] > seen + 2)
        assert "decode-0" not in c.router.dispatcher.registry.workers, "nor while its owner is away"
