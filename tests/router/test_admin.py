"""The operator's side door: workers are listed, drained, taken out and let in while requests run."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ports import free_port
from quiesce.api.chat import TextModel
from quiesce.channel import KeyPair
from quiesce.router import admin
from router.cluster import Cluster, cluster, until

pytestmark = pytest.mark.anyio

PAIRS = [{"role": "prefill"}, {"role": "decode", "hold": True}, {"role": "decode", "hold": True}]


@asynccontextmanager
async def operated(
    tmp_path: Path, text: TextModel, workers: Any = PAIRS
) -> AsyncIterator[tuple[Cluster, httpx.AsyncClient]]:
    with tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as short:
        path = Path(short) / "admin"
        async with cluster(tmp_path, text, workers, admin=f"unix://{path}") as c:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, "nobody else may speak to it"
            door = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=door, base_url="http://admin", timeout=60) as operator:
                yield c, operator


async def test_a_drained_worker_keeps_what_it_has_and_gets_nothing_new(tmp_path: Path, text: TextModel) -> None:
    async with operated(tmp_path, text) as (c, operator):
        waiting = asyncio.create_task(c.chat(max_tokens=1))
        busy = await until(lambda: next((w for w in c.workers if w.role == "decode" and w.active), None))
        other = next(w for w in c.workers if w.role == "decode" and w is not busy)
        answer = await operator.post(f"/workers/{busy.name}/drain")
        assert answer.json() == {"name": busy.name, "legs": 1}
        other.hold = False
        assert [(await c.chat()).status_code for _ in range(4)] == [200] * 4 and len(busy.starts) == 1
        shown = {w["name"]: w for w in (await operator.get("/workers")).json()["workers"]}
        assert shown[busy.name]["drained"] and "operator" in shown[busy.name]["trouble"]
        busy.answer(next(iter(busy.starts.values())))
        assert (await waiting).status_code == 200
        busy.hold = False
        assert (await operator.post(f"/workers/{busy.name}/resume")).status_code == 200
        for _ in range(500):  # it is chosen again once its own word has come
            assert (await c.chat()).status_code == 200
            if len(busy.starts) > 1:
                break
        assert len(busy.starts) > 1
        assert (await operator.post("/workers/nobody/drain")).status_code == 404


async def test_a_worker_that_is_taken_out_loses_its_requests_to_the_others_and_stays_out(
    tmp_path: Path, text: TextModel
) -> None:
    async with operated(tmp_path, text) as (c, operator):
        waiting = asyncio.create_task(c.chat())
        out = await until(lambda: next((w for w in c.workers if w.role == "decode" and w.active), None))
        other = next(w for w in c.workers if w.role == "decode" and w is not out)
        other.hold = False
        answer = await operator.delete(f"/workers/{out.name}")
        assert answer.json() == {"name": out.name, "legs_ended": 1}
        assert (await waiting).status_code == 200 and len(other.starts) == 1
        before = c.router.dispatcher.registry.refused
        await until(lambda: c.router.dispatcher.registry.refused > before + 2)  # it goes on asking, and is refused
        listed = (await operator.get("/workers")).json()
        assert out.name not in [w["name"] for w in listed["workers"]] and out.name not in listed["may_register"]


async def test_a_new_worker_is_let_in_by_its_key_and_serves(tmp_path: Path, text: TextModel) -> None:
    async with operated(tmp_path, text, [{"role": "prefill"}]) as (c, operator):
        assert (await c.chat()).status_code == 503
        keys = KeyPair.generate()
        keys.save(tmp_path / "decode-9.key")
        refused = c.router.dispatcher.counters()["refused_keys"]
        await c.add("decode", "decode-9")
        await until(lambda: c.router.dispatcher.counters()["refused_keys"] > refused)
        for body, status in (
            ({"name": "decode-9", "public_key": keys.public}, 200),
            ({"name": "decode-9", "public_key": KeyPair.generate().public}, 409),  # its name is taken
            ({"name": "other", "public_key": keys.public}, 409),
            ({"name": "router", "public_key": KeyPair.generate().public}, 400),
            ({"name": "../x", "public_key": KeyPair.generate().public}, 400),
            ({"name": "x", "public_key": "short"}, 400),
            ({"name": "x"}, 400),
        ):
            assert (await operator.post("/workers", json=body)).status_code == status, body
        assert (await operator.post("/workers", content=b"x" * 9000)).status_code == 413
        c.worker("decode-9").kill()  # a real worker asks again by itself
        await c.add("decode", "decode-9")
        await c.usable()
        assert (await c.chat()).status_code == 200


async def test_a_tcp_port_wants_its_key_and_this_machine(tmp_path: Path, text: TextModel) -> None:
    for address, key in (
        ("0.0.0.0:0", "k" * 20),
        ("127.0.0.1:0", ""),
        ("127.0.0.1:0", "short"),
        ("example.org:1", "k" * 20),
    ):
        with pytest.raises(ValueError, match="--admin"):
            admin.bind(address, key)
    (tmp_path / "key").write_text("a key of the operator\n")
    port = free_port()
    async with (
        cluster(tmp_path, text, admin=f"127.0.0.1:{port}", admin_key=tmp_path / "key"),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as operator,
    ):
        assert (await operator.get("/workers")).status_code == 401
        wrong = {"Authorization": "Bearer another"}
        assert (await operator.delete("/workers/decode-0", headers=wrong)).status_code == 401
        right = {"Authorization": "Bearer a key of the operator"}
        assert len((await operator.get("/workers", headers=right)).json()["workers"]) == 2
