"""SGLang's own router, as it is on PyPI, in front of Quiesce's workers: same text, and an abort frees both legs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e.conftest import QUICK, SIZES, short_folder, warmed
from e2e.product import Product, until
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Front:
    product: Product
    url: str  # of SGLang's router
    prefill: str
    decode: str
    http: httpx.Client
    client: openai.OpenAI


@pytest.fixture(scope="module")
def front(tiny: Path) -> Iterator[Front]:
    ports = [free_port() for _ in range(4)]
    workers = f"--http-port=prefill-0={ports[0]},decode-0={ports[1]}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(short_folder()))
        product = stack.enter_context(Product(tiny, folder, *SIZES, *QUICK, workers))
        warmed(product)
        prefill, decode, url = (f"http://127.0.0.1:{port}" for port in ports[:3])
        words = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
        words += ["--prefill", prefill, str(ports[0]), "--decode", decode, "--port", str(ports[2])]
        words += ["--prometheus-port", str(ports[3]), "--worker-startup-check-interval", "1"]
        log = stack.enter_context((folder / "sglang-router.log").open("wb"))
        router = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(_end, router)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        until(lambda: _ready(http, router), 170, "SGLang's router to have both workers")
        client = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60))
        yield Front(product, url, prefill, decode, http, client)


def _ready(http: httpx.Client, router: subprocess.Popen[bytes]) -> bool:
    assert router.poll() is None, "SGLang's router has ended"
    try:
        workers = http.get("/workers").json()["workers"]
        return len(workers) == 2 and all(worker["is_healthy"] for worker in workers)
    except (httpx.HTTPError, ValueError, KeyError):
        return False


def _end(router: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(router.pid, signal.SIGTERM)
    try:
        router.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(router.pid, signal.SIGKILL)
        router.wait()


MESSAGES: Any = [{"role": "user", "content": "hello there"}]


def test_chat_and_completions_say_what_our_own_router_says(front: Front) -> None:
    asked: dict[str, Any] = {"model": front.product.name, "max_tokens": 40, "temperature": 0}
    with front.product.client() as ours:
        chat = asked | {"messages": MESSAGES}
        expected = ours.chat.completions.create(**chat)
        whole = front.client.chat.completions.create(**chat)
        assert whole.choices[0].message.content == expected.choices[0].message.content
        assert whole.choices[0].finish_reason == expected.choices[0].finish_reason
        assert whole.usage == expected.usage
        chunks = front.client.chat.completions.create(**chat, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == expected.choices[0].message.content
        completion = asked | {"prompt": ["one two", "three"]}
        pair = [choice.text for choice in ours.completions.create(**completion).choices]
        assert [choice.text for choice in front.client.completions.create(**completion).choices] == pair
    front.product.check_idle(front.product.boot)


def test_samples_of_one_prompt_and_a_schema(front: Front) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    asked: dict[str, Any] = {"model": front.product.name, "messages": MESSAGES, "max_tokens": 60, "temperature": 1}
    asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for choice in front.client.chat.completions.create(**asked, n=3).choices:
        assert choice.message.content in ('{"ok": true}', '{"ok": false}')
    front.product.check_idle(front.product.boot)


def test_generate_with_text_ids_and_a_stream(front: Front) -> None:
    ids = [40, 41, 42]
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = front.product.ask(ids, tokens=12)
    answer = front.http.post("/generate", json={"input_ids": ids, "sampling_params": params}).json()
    assert answer["text"] == expected and len(answer["output_ids"]) == 12
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert answer["meta_info"]["prompt_tokens"] == 3
    both = front.http.post("/generate", json={"input_ids": [ids, [50]], "sampling_params": params}).json()
    assert [one["text"] for one in both] == [expected, front.product.ask([50], tokens=12)]
    with front.http.stream(
        "POST", "/generate", json={"input_ids": ids, "sampling_params": params, "stream": True}
    ) as s:
        lines = [line for line in s.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and f'"text":{_json(expected)}' in lines[-2]
    logged = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = front.http.post("/generate", json=logged).json()["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    front.product.check_idle(front.product.boot)


def _json(text: str) -> str:
    import msgspec  # noqa: PLC0415

    return msgspec.json.encode(text).decode()


def test_a_client_that_leaves_frees_both_legs(front: Front) -> None:
    body = {"model": front.product.name, "messages": MESSAGES, "max_tokens": 1900, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    with front.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        while "content" not in next(lines):
            pass
    front.product.check_idle(front.product.boot)


def test_abort_of_exactly_one_id_frees_both_legs(front: Front) -> None:
    body = {"model": front.product.name, "messages": MESSAGES, "max_tokens": 1900, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    headers = {"x-request-id": "the-one"}
    with front.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        while "content" not in next(lines):
            pass
        abort = f"{front.decode}/abort_request"
        assert httpx.post(abort, json={"rid": "the-o"}, timeout=60).json() == {"aborted": 0}, "a prefix is another id"
        assert httpx.post(abort, json={"rid": "the-one"}, timeout=60).json() == {"aborted": 1}
        rest = list(lines)
    assert any("aborted by /abort_request" in line for line in rest) and "data: [DONE]" not in rest
    front.product.check_idle(front.product.boot)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bootstrap_host": "169.254.169.254", "bootstrap_room": 1}, "no registered peer"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}, "no registered peer"),
        ({}, "bootstrap_room: must be there"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_room": -1}, "must be a number"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_room": 1, "lora_path": "x"}, "lora_path"),
    ],
)
def test_a_bootstrap_address_that_is_no_peer_is_refused(front: Front, fields: dict[str, Any], says: str) -> None:
    body = {"model": front.product.name, "messages": MESSAGES, "max_tokens": 4} | fields
    answer = httpx.post(f"{front.decode}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert not front.product.busy()


def test_the_pages_that_routers_read(front: Front) -> None:
    for base, mode in ((front.prefill, "prefill"), (front.decode, "decode")):
        info = httpx.get(f"{base}/get_server_info", timeout=60).json()
        assert info["disaggregation_mode"] == mode and info["page_size"] == 16
        assert httpx.get(f"{base}/get_model_info", timeout=60).json()["served_model_name"] == front.product.name
        assert (
            httpx.get(f"{base}/v1/models", timeout=60).json()["data"][0]["max_model_len"] == info["max_req_input_len"]
        )
        for page in ("health", "health_generate", "get_load", "flush_cache"):
            assert httpx.get(f"{base}/{page}", timeout=60).status_code == 200
