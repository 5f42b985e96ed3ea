"""The clients of a soak: tenants with a secret each, who read to the end, leave early, or read slowly."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"


@dataclass(frozen=True)
class Tenant:
    number: int
    marker: str  # in no other tenant's prompt

    def prompt(self, variant: int) -> str:
        start = 1 + 7 * variant
        padding = f" The word is {self.marker}." * (variant % 4 * 4)
        return f"My secret word is {self.marker}.{padding} Count from {start} to {start + 40}, separated by commas."


def tenants(count: int, draw: random.Random) -> list[Tenant]:
    markers: set[str] = set()
    while len(markers) < count:
        markers.add("".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(5)))
    return [Tenant(number, marker) for number, marker in enumerate(sorted(markers))]


@dataclass(frozen=True)
class Manner:
    """How a client behaves. `cut_after`: seconds; `cut_at`: pieces of text read; `pause`: seconds between pieces."""

    cut_after: float | None = None
    cut_at: int | None = None
    pause: float = 0.0

    @property
    def leaves(self) -> bool:
        return self.cut_after is not None or self.cut_at is not None


@dataclass
class Heard:
    """What one client got. `finished`: it has the whole answer."""

    text: str = ""
    pieces: int = 0
    finished: bool = False
    left: bool = False
    status: int = 0
    error: str = ""
    first: float | None = None  # seconds to the first piece
    began: float = field(default_factory=time.monotonic)


async def ask(
    client: httpx2.AsyncClient, model: str, prompt: str, tokens: int, manner: Manner, key: str = ""
) -> Heard:
    """Streams one chat completion; a client that leaves closes its connection, as a browser does."""
    heard = Heard()
    work = asyncio.ensure_future(_read(client, model, prompt, tokens, manner, key, heard))
    try:
        await asyncio.wait_for(work, manner.cut_after)
    except TimeoutError:
        heard.left = True
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


async def _read(
    client: httpx2.AsyncClient, model: str, prompt: str, tokens: int, manner: Manner, key: str, heard: Heard
) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        heard.status = answer.status_code
        if answer.status_code != 200:
            heard.error = (await answer.aread())[:300].decode(errors="replace")
            return
        async for event in _events(answer):
            if "error" in event:
                heard.error = str(event["error"])[:300]
                return
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                if piece:
                    heard.first = heard.first or time.monotonic() - heard.began
                    heard.text += piece
                    heard.pieces += 1
                heard.finished = heard.finished or choice.get("finish_reason") in ("stop", "length")
            if manner.cut_at is not None and heard.pieces >= manner.cut_at:
                heard.left = True
                return
            if manner.pause:
                await asyncio.sleep(manner.pause)


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
