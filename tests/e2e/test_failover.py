"""A decode worker is killed under streams of every kind: each goes on at the other one as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import QUICK, SIZES, short_folder, warmed
from e2e.product import START_SECONDS, Product, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKENS = 240  # seconds of streaming: none may be over before the last has begun, on a busy machine too
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "two", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "penalties": {"temperature": 0.8, "seed": 8, "presence_penalty": 0.7, "repetition_penalty": 1.1},
    "two samples": {"temperature": 1.0, "seed": 9, "n": 2},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "schema": {"temperature": 0.5, "seed": 10, "response_format": FORMAT},
}


@pytest.fixture(scope="module")
def two(tiny: Path) -> Iterator[Product]:
    options = (*SIZES, *QUICK, "--decode=2", "--deterministic")
    with short_folder() as path, Product(tiny, Path(path), *options) as product:
        yield warmed(product)


class Client:
    """One stream, read to its end; `begun` once every choice has some text."""

    def __init__(self, serve: Product, fields: dict[str, Any]) -> None:
        self._serve = serve
        self._asked = {"model": serve.name, "prompt": [40, 41, 42, 43, 44], "max_tokens": TOKENS, "stream": True}
        self._asked |= {"ignore_eos": "response_format" not in fields, "stream_options": {"include_usage": True}}
        self._asked |= fields
        self.begun = threading.Event()
        self.texts: dict[int, str] = {}
        self.tokens: list[Any] = []
        self.reasons: dict[int, str] = {}
        self.usage: dict[str, Any] | None = None
        self.ended = ""

    def run(self) -> Client:
        with self._serve.http.stream("POST", "/v1/completions", json=self._asked, timeout=100) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self._take(line[6:])
        return self

    def _take(self, data: str) -> None:
        self.ended = data
        if not data.startswith("{"):
            return
        event = json.loads(data)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.tokens += (choice.get("logprobs") or {}).get("tokens", [])
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]
        if len(self.texts) == self._asked.get("n", 1):
            self.begun.set()

    def seen(self) -> tuple[Any, ...]:
        usage = self.usage or {}
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        return self.texts, self.tokens, self.reasons, counts, self.ended


def kill_under(two: Product, victim: str, clients: list[Client]) -> None:
    """Runs them all; the victim dies as soon as each has text."""
    pid = two.pid(victim)
    with ThreadPoolExecutor(len(clients)) as pool:
        pairs = [(client, pool.submit(client.run)) for client in clients]
        until(lambda: all(client.begun.is_set() or future.done() for client, future in pairs), 60, "text everywhere")
        os.kill(pid, signal.SIGKILL)
        for _, future in pairs:
            future.result()
    until(lambda: len(two.epochs()) == 3 and two.healthy(), START_SECONDS, "the dead one to be back")
    two.check_idle()


def test_scenario_r103_streams_go_on_at_another_decode_worker_without_a_seam(two: Product) -> None:
    right = {name: Client(two, fields).run().seen() for name, fields in KINDS.items()}
    stop = {"temperature": 0, "stop": [right["greedy"][0][0][-40:-32]]}
    kinds = KINDS | {"a stop string": stop}
    right["a stop string"] = Client(two, stop).run().seen()
    assert all(seen[-1] == "[DONE]" for seen in right.values())
    cases = [(name, Client(two, fields)) for name, fields in kinds.items() for _ in range(2)]
    kill_under(two, "decode-0", [client for _, client in cases])
    for name, client in cases:
        assert client.seen() == right[name], name
    metrics = two.metrics()
    assert metrics["quiesce:router_failovers_total"] >= 1
    assert metrics["quiesce:router_answers_started_total"] == metrics["quiesce:router_answers_ended_total"]


def test_a_sampled_answer_without_a_seed_is_told_that_its_worker_died(two: Product) -> None:
    clients = [Client(two, {"temperature": 1.0, "max_tokens": 600}) for _ in range(4)]
    before = two.metrics()["quiesce:router_failovers_total"]
    kill_under(two, "decode-1", clients)
    told = [client for client in clients if '"error"' in client.ended]
    assert told and len(told) < 4, "both decode workers had some"
    assert all("decode-1" in client.ended for client in told)
    assert two.metrics()["quiesce:router_failovers_total"] == before
