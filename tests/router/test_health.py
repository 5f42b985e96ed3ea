"""Health that tells the truth: red when something is wrong with serving, green when it only takes long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quiesce.api.chat import TextModel
from quiesce.router.registry import Patience
from router.cluster import Cluster, cluster, until

pytestmark = pytest.mark.anyio

HELD = [{"role": "prefill", "hold": True}, {"role": "decode", "hold": True}]
# Beats come every 50 ms. A probe that has not come back for 0.4 s is late; nothing else is in a hurry.
QUICK = Patience(silent=20.0, stalled=60.0, probe=0.4)


async def trouble(c: Cluster, name: str) -> str | None:
    detail = (await c.client.get("/health")).json()
    return next(worker["trouble"] for worker in detail["workers"] if worker["name"] == name)


async def finish(c: Cluster, waiting: asyncio.Task[object]) -> None:
    for worker in (c.prefill, c.decode):
        worker.moving = True
        for rid in list(worker.active):
            worker.answer(worker.starts[rid])
    await waiting
    await c.idle()


async def test_n6_a_worker_that_waits_is_told_from_one_that_is_stuck_by_a_test_request(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text, HELD, QUICK) as c:
        waiting = asyncio.create_task(c.chat())
        await until(lambda: c.prefill.active and c.decode.active)
        c.prefill.moving = c.decode.moving = False  # both have work, and make no step
        c.decode.passes = None
        known = c.router.dispatcher.registry.workers
        await until(lambda: known["prefill-0"].probe_answered and known["decode-0"].probes)
        now = asyncio.get_running_loop().time
        deadline = now() + 30
        while "a test request has not come back" not in str(await trouble(c, "decode-0")):
            assert now() < deadline
            await asyncio.sleep(0.02)
        # Prefill has work and waits, and its engine is well; on a busy machine an answer of its own may be late once.
        while (await c.client.get("/ready?role=prefill")).status_code != 200:
            assert now() < deadline
            await asyncio.sleep(0.02)
        assert (await c.client.get("/health")).status_code == 503
        assert (await c.client.get("/ready?role=decode")).status_code == 503
        assert (await c.client.get("/ready")).status_code == 503
        assert (await c.client.get("/ready?role=nonsense")).status_code == 400
        await finish(c, waiting)
        await until(lambda: c.router.dispatcher.health()[0])
        assert (await c.client.get("/ready?role=decode")).status_code == 200


async def test_a_test_request_goes_to_every_worker_when_health_is_asked_for_it(
    tmp_path: Path, text: TextModel
) -> None:
    async with cluster(tmp_path, text) as c:
        answer = await c.client.get("/health?probe=1")
        assert answer.status_code == 200 and set(answer.json()["probes"]) == {"prefill-0", "decode-0"}
        assert all(0 <= seconds < 30 for seconds in answer.json()["probes"].values())
        c.prefill.passes = False
        answer = await c.client.get("/health?probe=1")
        assert answer.status_code == 503 and answer.json()["probes"]["prefill-0"] == "the engine broke"
        assert (await c.client.get("/health")).status_code == 503, "it is remembered"
        assert (await c.chat()).status_code == 503
        c.prefill.passes = True
        await until(lambda: c.router.dispatcher.health()[0])  # it is asked again by itself
        assert (await c.chat()).status_code == 200
        await c.idle()
        before = c.router.dispatcher.counters()
        await c.client.get("/health?probe=1")
        assert c.router.dispatcher.counters() == before, "test requests count nowhere"
        await c.idle()


async def test_scenario_g37_work_that_does_not_move_anywhere_makes_health_red(
    tmp_path: Path, text: TextModel
) -> None:
    """Every process answers, every probe passes: only the hand-off between the two does not happen."""
    async with cluster(tmp_path, text, HELD, Patience(silent=20.0, stalled=1.5)) as c:
        assert (await c.client.get("/health")).status_code == 200
        waiting = asyncio.create_task(c.chat())
        await until(lambda: c.prefill.active and c.decode.active)
        c.prefill.moving = c.decode.moving = False
        c.prefill.reported = c.decode.reported = {"running": 0}
        await until(lambda: not c.router.dispatcher.health()[0])
        answer = await c.client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["status"] == "stuck" and answer.json()["nothing_moved_for"] > 1.5
        await finish(c, waiting)
        assert (await c.client.get("/health")).status_code == 200
