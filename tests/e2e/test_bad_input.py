"""What cannot be served is refused by the router, in milliseconds, before anything is offered to anybody."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.conftest import CONTEXT, QUICK, SIZES, short_folder, warmed
from e2e.product import Product, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FAST = 2.0  # seconds, on any machine; what these bodies could cost is many
GOOD: dict[str, Any] = {"model": "tiny", "prompt": [10, 11], "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

# path, body, status, and what the message must name: the field, and the limit where there is one
BAD: dict[str, tuple[str, Any, int, tuple[str, ...]]] = {
    "prompt longer than the context": ("completions", GOOD | {"prompt": [9] * 5000}, 400, ("prompt", "5000", "2048")),
    "prompt that fills the context": ("completions", GOOD | {"prompt": [9] * CONTEXT}, 400, ("prompt", str(CONTEXT))),
    "text longer than the context": ("completions", GOOD | {"prompt": "1" * 9000}, 400, ("prompt", "2048")),
    "chat longer than the context": (
        "chat/completions", CHAT | {"messages": [{"role": "user", "content": "1" * 9000}]}, 400, ("messages", "2048"),
    ),
    "answer longer than the context": ("completions", GOOD | {"max_tokens": 3000}, 400, ("max_tokens", "2048")),
    "huge max_tokens": ("completions", GOOD | {"max_tokens": 1 << 40}, 400, ("max_tokens",)),
    "negative max_tokens": ("completions", GOOD | {"max_tokens": -1}, 400, ("max_tokens", "1")),
    "zero max_tokens": ("completions", GOOD | {"max_tokens": 0}, 400, ("max_tokens", "1")),
    "max_tokens of text": ("completions", GOOD | {"max_tokens": "many"}, 400, ("max_tokens",)),
    "unknown model": ("chat/completions", CHAT | {"model": "gpt-9"}, 404, ("model", "gpt-9")),
    "no model": ("chat/completions", {"messages": CHAT["messages"]}, 400, ("model",)),
    "empty prompt": ("completions", GOOD | {"prompt": ""}, 400, ("prompt",)),
    "empty list of tokens": ("completions", GOOD | {"prompt": []}, 400, ("prompt",)),
    "no messages": ("chat/completions", CHAT | {"messages": []}, 400, ("messages",)),
    "token id beyond the vocabulary": ("completions", GOOD | {"prompt": [10, 99_999]}, 400, ("prompt", "99999")),
    "negative token id": ("completions", GOOD | {"prompt": [-1]}, 400, ("prompt", "-1")),
    "huge token id": ("completions", GOOD | {"prompt": [1 << 70]}, 400, ("prompt",)),
    "negative temperature": ("completions", GOOD | {"temperature": -0.1}, 400, ("temperature", "0")),
    "huge temperature": ("completions", GOOD | {"temperature": 1e300}, 400, ("temperature", "2")),
    "top_p above one": ("completions", GOOD | {"top_p": 1.5}, 400, ("top_p", "1")),
    "top_p of zero": ("completions", GOOD | {"top_p": 0}, 400, ("top_p",)),
    "negative top_k": ("completions", GOOD | {"top_k": -5}, 400, ("top_k",)),
    "huge seed": ("completions", GOOD | {"seed": 1 << 80}, 400, ("seed",)),
    "too many stop strings": ("completions", GOOD | {"stop": ["x"] * 100}, 400, ("stop",)),
    "empty stop string": ("completions", GOOD | {"stop": [""]}, 400, ("stop",)),
    "unknown role shape": ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, 400, ("content",)),
    "several answers": ("completions", GOOD | {"n": 5000}, 400, ("n",)),
    "not an object": ("completions", [1, 2], 400, ()),
    "infinite temperature": ("completions", b'{"model":"tiny","prompt":"a","temperature":1e999}', 400, ()),
    "NaN": ("completions", b'{"model":"tiny","prompt":"a","temperature":NaN}', 400, ()),
    "bad JSON": ("completions", b'{"model":', 400, ("JSON",)),
    "no body": ("completions", b"", 400, ("JSON",)),
    "invalid UTF-8": ("completions", b'{"model":"tiny","prompt":"\xff\xfe"}', 400, ("UTF-8",)),
    "half a surrogate": ("completions", b'{"model":"tiny","prompt":"\\ud800"}', 400, ()),
    "deep nesting": ("completions", b'{"model":"tiny","prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, ()),
}  # fmt: skip


def hand_offs(serve: Product) -> dict[str, tuple[int, int]]:
    """Leases ever opened and steps ever run, by worker."""
    return {name: (state["leases_opened"], state["steps"]) for name, state in serve.ledger().items()}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_hand_off(serve: Product, case: str) -> None:
    path, body, status, named = BAD[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    before, seconds = hand_offs(serve), []
    for _ in range(3):
        began = time.monotonic()
        answer = serve.http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
        seconds.append(time.monotonic() - began)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in named), error["message"]
    assert error["param"] is None or error["param"] in error["message"]
    assert len(error["message"]) < 1000
    assert min(seconds) < FAST, "a busy machine may be slow once, not three times"
    assert hand_offs(serve) == before


def test_body_larger_than_the_limit_is_refused(serve: Product) -> None:
    before = hand_offs(serve)
    answer = serve.http.post("/v1/completions", content=b'{"prompt":"' + b"a" * (9 << 20) + b'"}')
    assert answer.status_code == 413 and str(8 << 20) in answer.json()["error"]["message"]
    assert hand_offs(serve) == before


def test_unknown_path_and_method_answer_in_the_same_shape(serve: Product) -> None:
    for answer in (serve.http.get("/v1/nothing"), serve.http.get("/v1/completions")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# ------------------------------------------------------------ a full system


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Product]:
    """It takes four requests."""
    with short_folder() as path, Product(tiny, Path(path), *SIZES, *QUICK, "--max-inflight=4") as product:
        yield warmed(product)


def test_a_full_system_answers_503_with_retry_after(narrow: Product) -> None:
    answers: list[httpx.Response] = []

    def long() -> None:
        body = GOOD | {"max_tokens": 1200, "ignore_eos": True, "temperature": 0}
        answers.append(httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=120))

    decode = narrow.pid("decode-0")
    running = [threading.Thread(target=long) for _ in range(4)]
    for thread in running:
        thread.start()
    until(lambda: narrow.http.get("/health").json()["requests"] == 4, 30, "four requests to run")
    os.kill(decode, signal.SIGSTOP)  # so that they do, however long the next one takes
    try:
        assert not answers
        refused = narrow.http.post("/v1/completions", json=GOOD)
        assert not answers, "it did not wait for one of the four"
    finally:
        os.kill(decode, signal.SIGCONT)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "overloaded_error" and "4" in refused.json()["error"]["message"]
    for thread in running:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert narrow.http.post("/v1/completions", json=GOOD).status_code == 200
    narrow.check_idle(narrow.boot)
