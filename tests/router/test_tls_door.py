"""HTTP behind TLS: who shows a certificate of the authority gets in, nobody else does, and each is counted."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import Hosts, make_hosts
from quiesce.api.chat import TextModel
from quiesce.channel.tls import Certificates
from quiesce.ops.probe import http_probe
from quiesce.router.app import Router
from quiesce.router.http import HEAD_SECONDS
from router.cluster import Cluster, body, cluster, make_keys, settings_for, until

pytestmark = pytest.mark.anyio

ASK = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    return make_hosts(tmp_path_factory.mktemp("hosts"))


def files(tls: Certificates) -> dict[str, Any]:
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.ca}


def refused(c: Cluster) -> dict[str, int]:
    counters = c.router.dispatcher.counters()
    return {name: counters[f"http_tls_{name}"] for name in ("no_certificate", "bad_certificate", "failed")}


async def get(c: Cluster, context: ssl.SSLContext) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{c.router.port}", verify=context, timeout=60) as client:
        return await client.get("/ready")


async def test_only_a_certificate_of_the_authority_that_is_in_force_gets_in(
    tmp_path: Path, text: TextModel, hosts: Hosts
) -> None:
    async with cluster(tmp_path, text, **files(hosts.tls)) as c:
        good = hosts.client(hosts.beta)
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{c.router.port}", verify=good, timeout=60
        ) as client:
            answer = await client.post("/v1/chat/completions", json=body())
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert refused(c) == {"no_certificate": 0, "bad_certificate": 0, "failed": 0}
        with pytest.raises(httpx.HTTPError):
            await get(c, hosts.client(None))
        await until(lambda: refused(c)["no_certificate"] == 1)
        for count, host in enumerate((hosts.stranger, hosts.ended), 1):
            with pytest.raises(httpx.HTTPError):
                await get(c, hosts.client(host))
            await until(lambda count=count: refused(c)["bad_certificate"] == count)
        with pytest.raises(httpx.HTTPError):  # plain HTTP
            await c.client.get("/ready")
        await until(lambda: refused(c)["failed"] == 1)
        probe = http_probe("127.0.0.1", c.router.port, hosts.tls.client(check_name=False))
        deadline = time.monotonic() + 30
        while not (health := await probe()).answers:  # it is not patient: the supervisor asks again
            assert time.monotonic() < deadline
        assert health.ready and len(health.workers) == 2
        await until(lambda: c.router._gate.open == 0)
        assert not c.router._gate.headless


async def test_a_handshake_that_stops_is_bounded_as_a_half_request_is(
    tmp_path: Path, text: TextModel, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, text, **files(hosts.tls)) as c:
        gate = c.router._gate
        monkeypatch.setattr(gate, "most_headless", 8)
        held = [socket.create_connection(("127.0.0.1", c.router.port)) for _ in range(20)]
        await until(lambda: gate.counters()["http_heads_evicted"] >= 12)
        await until(lambda: len(gate.headless) <= 8 and gate.open <= 8)  # what is ended leaves in the next turn
        assert (await get(c, hosts.client(hosts.alpha))).status_code == 200, "it goes on meanwhile"
        monkeypatch.setattr(gate, "seconds", 0.2)
        late = socket.create_connection(("127.0.0.1", c.router.port))
        await until(lambda: gate.counters()["http_heads_late"] >= 1)
        for each in (*held, late):
            each.close()
        await until(lambda: gate.open == 0)
        assert refused(c)["failed"] <= 8, "those that the gate ended are counted there"


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    tmp_path: Path, text: TextModel, hosts: Hosts
) -> None:
    """In one segment, so that the server has it before it knows that the handshake is over."""

    def talk(port: int) -> bytes:
        ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = hosts.client(hosts.alpha).wrap_bio(theirs, ours, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.settimeout(60)
            while True:
                try:
                    end.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    wire.sendall(ours.read())
                    theirs.write(wire.recv(65536))
            end.write(ASK)
            wire.sendall(ours.read())
            answer = b""
            while chunk := wire.recv(65536):
                theirs.write(chunk)
                try:
                    while more := end.read(65536):
                        answer += more
                    return answer
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLZeroReturnError:
                    return answer
            return answer

    async with cluster(tmp_path, text, **files(hosts.tls)) as c:
        for _ in range(20):
            answer = await asyncio.to_thread(talk, c.router.port)
            assert answer.startswith(b"HTTP/1.1 200 "), answer


async def test_a_server_that_stops_does_not_wait_for_half_handshakes(
    tmp_path: Path, text: TextModel, hosts: Hosts
) -> None:
    async with cluster(tmp_path, text, **files(hosts.tls)) as c:
        half = socket.create_connection(("127.0.0.1", c.router.port))
        await until(lambda: c.router._gate.headless)
        began = time.monotonic()
        c.router.stop()
        await until(lambda: c.router._server.should_exit and not c.router._gate.headless)
        assert time.monotonic() - began < 0.8 * HEAD_SECONDS, "it would be waited for until then"
        half.close()


def _widen(path: Path) -> None:
    path.chmod(0o644)


def _stranger(path: Path) -> None:
    path.write_text("-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n")


@pytest.mark.skipif(os.getuid() != 0, reason="where others own no file, the mode alone counts")
async def test_a_key_that_root_owns_is_not_refused_for_its_group_to_another_user(tmp_path: Path) -> None:
    from quiesce.channel import private  # noqa: PLC0415

    path = tmp_path / "mounted.key"
    path.write_text("x")
    path.chmod(0o440)
    with pytest.raises(ValueError, match="others can read"):
        private.check_private(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private.os, "getuid", lambda: 1000)
        private.check_private(path)
        path.chmod(0o444)
        with pytest.raises(ValueError, match="others can read"):
            private.check_private(path)


@pytest.mark.parametrize(("damage", "says"), [(_widen, "others can read or change"), (_stranger, "TLS with")])
async def test_a_key_that_does_not_do_keeps_the_router_from_starting(
    tmp_path: Path, text: TextModel, damage: Callable[[Path], None], says: str
) -> None:
    hosts = make_hosts(tmp_path / "hosts")
    damage(hosts.alpha / "tls" / "host.key")
    make_keys(tmp_path, ["router"])
    with pytest.raises(ValueError, match=says):
        Router(settings_for(tmp_path, tmp_path, **files(hosts.tls)), text)


async def test_a_certificate_that_has_ended_or_is_of_another_authority_is_refused_at_start_up(
    tmp_path: Path, text: TextModel, hosts: Hosts
) -> None:
    make_keys(tmp_path, ["router"])
    old = hosts.ended / "tls"
    for wrong, says in (
        (Certificates(old / "host.pem", old / "host.key", hosts.folder / "ca.pem"), "expired"),
        (
            Certificates(hosts.tls.cert, hosts.tls.key, hosts.stranger / "tls" / "ca.pem"),
            "unable to get local",
        ),
        (Certificates(hosts.tls.cert, hosts.beta / "tls" / "host.key", hosts.tls.ca), "MISMATCH"),
    ):
        with pytest.raises(ValueError, match=says):
            Router(settings_for(tmp_path, tmp_path, **files(wrong)), text)
