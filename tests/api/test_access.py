"""API keys: who may ask, and how much."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import openai
import pytest

from quiesce.api.access import Access, Key, read_keys
from quiesce.api.chat import TextModel
from quiesce.api.errors import ApiError
from router.cluster import Cluster, body, cluster, until

pytestmark = pytest.mark.anyio

ACME, ZOO, CHIEF = "sk-acme-0123456789", "sk-zoo-0123456789ab", "sk-chief-0123456789"


def written(path: Path, extra: str = "", mode: int = 0o600) -> Path:
    digest = hashlib.sha256(ZOO.encode()).hexdigest()
    path.write_text(
        f'[[key]]\ntenant = "acme"\nkey = "{ACME}"\nmax_concurrent = 1\n'
        f'[[key]]\ntenant = "zoo"\nsha256 = "{digest}"\ntokens_per_minute = 60\nrequests_per_minute = 3\n'
        f'[[key]]\ntenant = "chief"\nkey = "{CHIEF}"\nadmin = true\n{extra}'
    )
    path.chmod(mode)
    return path


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_a_key_is_known_plain_or_hashed_and_others_are_not(tmp_path: Path) -> None:
    access = Access(written(tmp_path / "keys"))
    assert access.closed and not Access().closed
    assert access.who(bearer(ACME)).tenant == "acme" and access.who(bearer(ZOO)).tenant == "zoo"
    assert access.who({b"authorization": f"bearer {ACME}".encode()}).tenant == "acme"
    for headers in ({}, bearer(ACME + "x"), bearer(""), bearer("x" * 100_000), {b"authorization": b"Basic abc"}):
        with pytest.raises(ApiError) as caught:
            access.who(headers)
        assert caught.value.status == 401
    assert Access().who({}).tenant == ""


def test_a_key_that_is_taken_back_is_refused_without_a_restart(tmp_path: Path) -> None:
    clock, file = Clock(), written(tmp_path / "keys")
    access = Access(file, clock)
    kept = access.who(bearer(ZOO))
    new = f'[[key]]\ntenant = "zoo"\nkey = "{ZOO}"\n'
    file.write_text("not toml [")
    clock.now += 2
    assert access.who(bearer(ACME)), "a file that cannot be read changes nothing"
    written(file, '[[key]]\ntenant = "new"\nkey = "sk-new-0123456789"\n')
    clock.now += 2
    assert access.who(bearer("sk-new-0123456789")).tenant == "new"
    assert access.who(bearer(ZOO)) is kept, "what a key has used stays known"
    file.write_text(new)
    os.utime(file, ns=(1, 1))
    clock.now += 2
    assert access.who(bearer(ZOO)).tenant == "zoo"
    with pytest.raises(ApiError):
        access.who(bearer(ACME))


def refused(call: object, *arguments: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.status == 429 and caught.value.retry_after
    return caught.value


def test_quotas_are_refilled_by_the_clock(tmp_path: Path) -> None:
    clock = Clock()
    key: Key = Access(written(tmp_path / "keys"), clock).who(bearer(ZOO))
    for _ in range(3):
        key.enter(clock.now)
        key.leave()
    assert refused(key.enter, clock.now).retry_after == 20  # three a minute: the next is due in 20 s
    key.enter(clock.now + 20)
    key.afford(clock.now)
    key.used(50)
    key.used(100)  # more than was left: paid off before the next
    assert refused(key.afford, clock.now).retry_after == 91  # one a second, and one must be left
    key.afford(clock.now + 91)
    one: Key = Access(written(tmp_path / "keys"), clock).who(bearer(ACME))
    one.enter(clock.now)
    assert "1 requests of this key run" in refused(one.enter, clock.now).message
    one.leave()
    one.enter(clock.now)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[key]]\ntenant = ''\nkey='0123456789abcdef'", "printable"),
        ("[[key]]\ntenant = 'a'", "either key or sha256"),
        ("[[key]]\ntenant = 'a'\nkey='short-secret'", "16 to 512"),
        ("[[key]]\ntenant = 'a'\nsha256='xyz'", "64 hex digits"),
        (f"[[key]]\ntenant='a'\nkey='0123456789abcdef'\ntokens_per_minute={10**400}", "0 to 9007199254740992"),
        ("[[key]]\ntenant = 'a'\nkey='0123456789abcdef'\nquota=1", "unknown field"),
        ("[[key]]\ntenant = 'a'\nkey='0123456789abcdef'\nmax_concurrent=-1", "must be 0 to"),
        ("[[key]]\ntenant = 'a'\nkey='0123456789abcdef'\n" * 2, "twice"),
        ("", "key"),
        ("[[key", "not TOML"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_and_no_key_is_shown(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=says) as caught:
        read_keys(file)
    assert "0123456789" not in str(caught.value) and "secret" not in str(caught.value)


def test_plain_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        read_keys(written(tmp_path / "keys", mode=0o644))
    assert ACME not in repr(read_keys(written(tmp_path / "keys")))


@pytest.fixture
async def c(tmp_path: Path, text: TextModel) -> AsyncIterator[Cluster]:
    workers = [{"role": "prefill"}, {"role": "decode", "hold": True}]
    async with cluster(tmp_path, text, workers, api_keys=written(tmp_path / "api-keys")) as made:
        yield made


async def test_every_route_but_those_of_probes_needs_a_key(c: Cluster) -> None:
    for route in c.router._server.config.app.routes:
        path = route.path.replace("{name:path}", "tiny")
        answer = await c.client.request("POST" if "GET" not in (route.methods or ()) else "GET", path)
        free = path in ("/health", "/ready", "/metrics", "/openapi.json")
        assert (answer.status_code != 401) == free, path
        if not free:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "missing_api_key"
    assert not c.prefill.starts and not c.decode.starts
    metrics = (await c.client.get("/metrics")).text
    assert 'quiesce:http_not_let_in_total{status="401"} 0.0' not in metrics
    for key, status in ((ACME, 403), (CHIEF, 200)):
        answer = await c.client.get("/debug/ledger", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status


async def test_a_tenant_reaches_both_legs_with_a_salt_and_its_key_is_never_logged(
    c: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key=ACME, max_retries=0) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            fields: dict[str, object] = {"extra_body": {"cache_salt": "mine"}, "max_tokens": 2}
            await client.completions.create(model="tiny", prompt="hi", **fields)  # type: ignore[call-overload]

        tasks.start_soon(ask)
        rid = await until(lambda: next(iter(c.decode.active), None))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert caught.value.response.headers["retry-after"] == "1"
        c.decode.tokens(rid, 40, 41)
        c.decode.end(rid, "length")
    await c.heard(1)
    for worker in (c.prefill, c.decode):
        (start,) = worker.starts.values()
        assert start.tenant == "acme" and start.salt == "acme\0mine"
    with pytest.raises(openai.AuthenticationError):
        async with openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
            await stranger.models.list()
    assert ACME not in caplog.text and "sk-wrong" not in caplog.text
    assert "acme" in [getattr(record, "tenant", None) for record in caplog.records]


async def test_tokens_of_prompt_and_answer_are_counted(c: Cluster) -> None:
    headers = {"authorization": f"Bearer {ZOO}"}
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            answer = await c.client.post("/v1/completions", headers=headers, json=body_of(50))
            assert answer.status_code == 200

        tasks.start_soon(ask)
        rid = await until(lambda: next(iter(c.decode.active), None))
        c.decode.tokens(rid, *[40] * 50)
        c.decode.end(rid, "length")
    refusal = await c.client.post("/v1/completions", headers=headers, json=body_of(1))
    assert refusal.status_code == 429 and refusal.json()["error"]["code"] == "rate_limit_exceeded_tokens"
    assert refusal.headers["retry-after"].isdigit()


def body_of(tokens: int) -> dict[str, object]:
    fields = {key: value for key, value in body().items() if key != "messages"}
    return fields | {"prompt": list(range(10, 40)), "max_tokens": tokens}
