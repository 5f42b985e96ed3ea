"""A client that streams many answers at once, and takes little of the machine that it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from bench.report import Spread, spread

Ask = Callable[[list[int], int], Awaitable["Timed"]]
DEADLINE = 600.0  # seconds for an answer: of 32 at once on a slow core, too


@dataclass(frozen=True)
class Timed:
    """Seconds from the request to its first token, and from there to its last; tokens as the server counts them."""

    first: float
    rest: float
    tokens: int

    @property
    def tpot(self) -> float:
        return self.rest / (self.tokens - 1)


@dataclass
class Answer:
    """An HTTP response as it arrives: its body's lines, each with the time at which it came."""

    lines: list[tuple[float, bytes]] = field(default_factory=list)
    heard: Callable[[], None] = lambda: None  # called when there are more
    over: bool = False
    left: bytes = b""

    def on_body(self, body: bytes) -> None:
        *whole, self.left = (self.left + body).split(b"\n")
        now = time.perf_counter()
        if more := [(now, line) for line in whole if line.strip()]:
            self.lines += more
            self.heard()

    def on_message_complete(self) -> None:
        self.over = True

    def text(self) -> str:
        return b"\n".join([line for _, line in self.lines] + [self.left]).decode()


async def post(port: int, path: str, body: dict[str, Any], heard: Callable[[], None] = lambda: None) -> Answer:
    """The whole answer of a server on this machine. Raises RuntimeError for any but 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
    answer = Answer(heard=heard)
    parser = httptools.HttpResponseParser(answer)
    async with asyncio.timeout(DEADLINE):
        while not answer.over and (received := await reader.read(1 << 16)):
            parser.feed_data(received)
    writer.close()
    if not answer.over or parser.get_status_code() != 200:
        raise RuntimeError(f"port {port} answered {parser.get_status_code()} to {path}: {answer.text()[:2000]}")
    return answer


def completion(model: str, prompt: list[int], tokens: int, stream: bool = True) -> dict[str, Any]:
    """A body that Quiesce and vLLM both take."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return body | {"ignore_eos": True} | streamed


def timed(answer: Answer, begun: float) -> Timed:
    """Of a streamed answer; what its events hold is read only now, when nobody waits for it."""
    first, last, tokens = 0.0, 0.0, 0
    for at, line in answer.lines:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("error"):
            raise RuntimeError(f"an answer failed in the middle: {event['error']}")
        if event.get("choices"):  # a token, though it may be but a part of a character
            last = at
            first = first or at
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if tokens < 2 or not first:
        raise RuntimeError(f"an answer had {tokens} tokens: {answer.text()[:500]}")
    return Timed(first - begun, last - first, tokens)


def burst(ask: Ask, prompts: list[list[int]], tokens: int) -> tuple[float, list[Timed]]:
    """All at once. Seconds until the last has its answer, and each one's times."""

    async def all_of_them() -> tuple[float, list[Timed]]:
        begun = time.perf_counter()
        answers = await asyncio.gather(*(ask(prompt, tokens) for prompt in prompts))
        return time.perf_counter() - begun, answers

    return asyncio.run(all_of_them())


def figures(bursts: list[tuple[float, list[Timed]]]) -> dict[str, Spread]:
    """Over bursts: tokens a second of each; of TTFT and TPOT the median within each."""
    return {
        "tokens/s": spread([sum(one.tokens for one in answers) / took for took, answers in bursts]),
        "TTFT ms": spread([1e3 * spread([one.first for one in answers]).median for _, answers in bursts]),
        "TPOT ms": spread([1e3 * spread([one.tpot for one in answers]).median for _, answers in bursts]),
    }
