"""Every way in which a leg can fail, at every point of a request: its client hears in time, the other leg is freed.

Six ways: the worker says 400 or 500, its socket takes no connection (refuse), its connection breaks and comes back
(reset), it says nothing any more (stall), it dies (kill). Three points: before anything of the hand-off has happened,
during it, and after it, when decode has given its first tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from quiesce.api.chat import TextModel
from quiesce.core.messages import Ended
from quiesce.router.registry import Patience
from router.cluster import Cluster, FakeWorker, cluster, until

pytestmark = pytest.mark.anyio

SIDES = ("prefill", "decode")
FAULTS = ("400", "500", "refuse", "reset", "stall", "kill")
PHASES = ("before", "during", "after")
IN_TIME = 20.0  # seconds, on any machine; the deadline of a request is minutes
# A worker that says nothing may only be stopped: its requests wait for the hold timeout, which is short here.
# It counts from the blow to the next request: what stops a thread for a second before must not be a lost worker.
STALLED = Patience(silent=0.5, lost=1.5, forgotten=60.0)
HELD = ({"role": "prefill", "hold": True}, {"role": "decode", "hold": True})
CELLS = list(itertools.product(SIDES, FAULTS, PHASES, (False, True)))


def says(worker: FakeWorker, rid: str, status: int) -> None:
    outcome = "refused" if status == 400 else "failed"
    if rid in worker.active:
        worker.end(rid, outcome, status, "as the table says", "" if status == 400 else "self")
    else:  # its leg is over: the router must not care
        router = worker.routers[-1]
        assert worker.control.send(router, Ended(rid, outcome, status, "too late"))


def strike(c: Cluster, worker: FakeWorker, fault: str, rid: str | None) -> None:
    match fault:
        case "400" | "500":
            assert rid is not None
            says(worker, rid, int(fault))
        case "refuse":
            worker.unplug()
        case "reset":
            worker.unplug()
            worker.plug_in()
        case "stall":
            c.router.dispatcher.registry.patience = STALLED
            worker.silent = worker.hold = worker.deaf = True
            worker.on_start = None
        case "kill":
            worker.kill()
            c.exited(worker)


async def begin(c: Cluster, stream: bool) -> tuple[asyncio.Task[Any], str]:
    waiting = asyncio.create_task(c.chat(stream=stream, max_tokens=3))
    rid = await until(lambda: next(iter(c.decode.active), None))
    await until(lambda: rid in c.prefill.active)
    return waiting, rid


@pytest.mark.parametrize(("side", "fault", "phase", "stream"), CELLS)
async def test_leg_failure(tmp_path: Path, text: TextModel, side: str, fault: str, phase: str, stream: bool) -> None:
    loop = asyncio.get_running_loop()
    async with cluster(tmp_path, text, HELD) as c:
        worker, other = (c.prefill, c.decode) if side == "prefill" else (c.decode, c.prefill)
        if phase == "before":
            if fault in ("400", "500", "reset"):
                worker.on_start = lambda worker, start: strike(c, worker, fault, start.rid)
            else:
                strike(c, worker, fault, None)
            struck = loop.time()
            waiting = asyncio.create_task(c.chat(stream=stream, max_tokens=3))
        else:
            waiting, rid = await begin(c, stream)
            if phase == "after":
                c.prefill.end(rid, "handed_over")
                c.decode.tokens(rid, 40, 41)
                await until(lambda: c.router.dispatcher._calls[rid].machine.tokens == 2)
            struck = loop.time()
            strike(c, worker, fault, rid)
        if side == "prefill" and phase == "after":
            # The hand-off has happened: whatever becomes of prefill, the answer is decode's.
            await asyncio.sleep(0.1)
            c.decode.tokens(rid, 42)
            c.decode.end(rid, "length")
            answer = await waiting
            assert answer.status_code == 200 and ("[DONE]" in answer.text or not stream)
        else:
            answer = await waiting
            assert loop.time() - struck < IN_TIME + (STALLED.lost if fault == "stall" else 0), "the client hears"
            told(answer, fault, phase, stream)
            await until(lambda: not other.active, IN_TIME)  # it was cancelled, or never had the leg
        await clean(c, worker, fault)


def told(answer: Any, fault: str, phase: str, stream: bool) -> None:
    """One error, in the place where a client looks for it, and never the end of a good answer."""
    if stream and phase == "after":
        assert answer.status_code == 200 and '"error"' in answer.text and "[DONE]" not in answer.text
        return
    right = {"400": {400}, "500": {500}}.get(fault, {502, 503})
    assert answer.status_code in right, answer.text
    assert answer.json()["error"]["message"]


async def clean(c: Cluster, worker: FakeWorker, fault: str) -> None:
    """The fault is over, one way or the other: nothing is left, and the next request is served."""
    if fault == "refuse":
        worker.plug_in()
    if fault == "stall":
        c.router.dispatcher.registry.patience = Patience()
        worker.silent = worker.deaf = False
        for rid in list(worker.active):
            worker.end(rid, "cancelled", 499)
    if fault in ("refuse", "reset"):
        c.exited(worker)  # or else its legs wait for cancels that nobody can answer
        worker.epoch += 1
    if fault == "kill":
        worker = await c.add(worker.role, worker.name)
    known = c.router.dispatcher.registry.workers
    await until(lambda: (now := known.get(worker.name)) and now.epoch == worker.epoch and now.up)
    c.prefill.hold = c.decode.hold = False
    c.prefill.on_start = c.decode.on_start = None
    await c.idle()
    await c.usable()
    assert (await c.chat()).status_code == 200
    await c.idle()
    counters = c.router.dispatcher.counters()
    assert counters["answers_started"] == counters["answers_ended"]
