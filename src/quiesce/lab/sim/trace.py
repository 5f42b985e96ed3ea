"""Requests to simulate: the shape of a real trace, made small enough for a pool that can be simulated."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from importlib import resources

import msgspec

BLOCK = 512  # tokens that one hash id of the trace stands for
MEDIAN_BLOCKS = 14  # of the trace's prompts


class Line(msgspec.Struct, frozen=True):
    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """One request, scaled: seconds since the one before it, prompt pages (equal numbers: the same page), answer."""

    gap: float
    pages: tuple[int, ...]
    tail: float  # how much of the last page is filled
    answer: int  # tokens


@functools.cache
def sample() -> tuple[Line, ...]:
    text = resources.files("quiesce.lab").joinpath("data/conversation_sample.jsonl").read_bytes()
    decoder = msgspec.json.Decoder(Line)
    return tuple(decoder.decode(line) for line in text.splitlines() if line)


def shapes(rng: random.Random, count: int, *, rate: float, median_pages: float, most_pages: int, most_answer: int
           ) -> list[Shape]:  # fmt: skip
    """`count` requests that follow one another in the trace, at `rate` a second on average.

    Lengths keep the trace's proportions: its median prompt becomes `median_pages`, cut at `most_pages`; answers are
    scaled so that the longest (2,000 tokens) becomes `most_answer`."""
    lines = sample()
    first = rng.randrange(len(lines))
    span = max(1, lines[-1].timestamp - lines[0].timestamp) / 1000
    stretch = len(lines) / span / rate
    scale = median_pages / MEDIAN_BLOCKS
    made, before, lap = [], lines[first].timestamp, 0
    for index in range(first, first + count):
        line = lines[index % len(lines)]
        if index and index % len(lines) == 0:
            before, lap = line.timestamp, lap + 1
        length = min(most_pages, max(1, round(line.input_length / BLOCK * scale)))
        step = len(line.hash_ids) / length
        blocks = [line.hash_ids[min(len(line.hash_ids) - 1, int(i * step))] for i in range(length)]
        # A page's number says what is in it and in all before it. Laps share nothing.
        pages = tuple(((lap << 24 | block) << 12) + place for place, block in enumerate(blocks))
        gap = max(0, line.timestamp - before) / 1000 * stretch
        answer = max(1, round(line.output_length / 2000 * most_answer))
        made.append(Shape(gap, pages, rng.random(), answer))
        before = line.timestamp
    return made
