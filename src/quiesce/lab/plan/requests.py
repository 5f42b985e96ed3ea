"""The requests of a plan: from a trace or from distributions, as arrays with all their dice thrown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quiesce.lab.plan.options import Workload

Floats = np.ndarray
DEFAULT_RATE = 10.0
DEFAULT_REQUESTS = 20_000
NEVER = float("inf")


class PlanError(ValueError):
    """What was asked for cannot be planned; the text is for people."""


@dataclass(frozen=True)
class Requests:
    """One entry a request, in order of arrival. Seconds from the start; `leaves`: inf when the client stays.

    `storm` is drawn once in 0..1 for whom a storm may take: below its share, the client leaves at `storm_place` of
    its length. `luck` decides how often an ABORT is lost."""

    arrival: Floats
    prompt: Floats  # tokens
    answer: Floats
    leaves: Floats
    storm: Floats
    storm_place: Floats
    luck: Floats

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival[-1])

    @property
    def rate(self) -> float:
        return (len(self) - 1) / self.seconds if self.seconds else float(len(self))


def requests_of(wanted: Workload) -> Requests:
    """Raises PlanError."""
    if not 0 <= wanted.abort_rate <= 1:
        raise PlanError(f"--abort-rate is a share of all requests, 0 to 1, not {wanted.abort_rate}")
    if wanted.rate is not None and not 0 < wanted.rate < NEVER:
        raise PlanError(f"--rate must be above 0, not {wanted.rate}")
    if not 0 <= wanted.abort_after < NEVER:
        raise PlanError(f"--abort-after is in seconds, from 0 on, not {wanted.abort_after}")
    if wanted.context_length < 2:
        raise PlanError(f"--context-length must hold a prompt and an answer, at least 2, not {wanted.context_length}")
    if wanted.seed < 0:
        raise PlanError(f"--seed must be 0 or more, not {wanted.seed}")
    rng = np.random.default_rng(wanted.seed)
    if wanted.trace is not None:
        arrival, prompt, answer = _from_trace(wanted.trace, wanted.requests, wanted.rate, rng)
    else:
        count = DEFAULT_REQUESTS if wanted.requests is None else wanted.requests
        if count < 2:
            raise PlanError(f"--requests must be at least 2, not {count}")
        arrival = np.cumsum(rng.exponential(1 / (wanted.rate or DEFAULT_RATE), count))
        arrival -= arrival[0]
        prompt, answer = draw(wanted.prompt, count, rng, "--prompt"), draw(wanted.answer, count, rng, "--answer")
    prompt = np.clip(np.ceil(prompt), 1, wanted.context_length - 1)
    answer = np.clip(np.ceil(answer), 1, wanted.context_length - prompt)
    count = len(arrival)
    stays = rng.random(count) >= wanted.abort_rate
    leaves = np.where(stays, NEVER, arrival + rng.exponential(wanted.abort_after, count))
    return Requests(arrival, prompt, answer, leaves, rng.random(count), rng.random(count), rng.random(count))


def draw(text: str, count: int, rng: np.random.Generator, flag: str) -> Floats:
    """`count` lengths of a distribution named in words. Raises PlanError."""
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
        if not all(0 < number < NEVER for number in numbers):
            raise ValueError("not positive")
        if kind == "fixed" and len(numbers) == 1:
            return np.full(count, numbers[0])
        if kind == "uniform" and len(numbers) == 2 and numbers[0] <= numbers[1]:
            return rng.uniform(numbers[0], numbers[1], count)
        if kind == "exponential" and len(numbers) == 1:
            return rng.exponential(numbers[0], count)
        if kind == "lognormal" and len(numbers) == 2:
            return numbers[0] * np.exp(rng.normal(0.0, numbers[1], count))
    except ValueError:
        pass
    raise PlanError(
        f"{flag} {text!r} is no distribution: fixed:N, uniform:LOW,HIGH, exponential:MEAN, lognormal:MEDIAN,SIGMA "
        f"with numbers above 0"
    )


def _from_trace(
    path: Path, count: int | None, rate: float | None, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """In the trace's order, from its start on, as often as needed. Requests with one timestamp, which it rounds to
    seconds, are spread over the time to the next."""
    times, prompts, answers = _lines(path)
    whole = len(times)
    count = whole if count is None else count
    if count < 2:
        raise PlanError(f"{path} has {whole} requests and --requests is {count}: at least 2 are needed")
    order = np.argsort(times, kind="stable")
    spread = _spread(times[order], rng)
    span = spread[-1] + (spread[-1] / max(1, whole - 1)) or 1.0
    laps = np.arange(count) // whole
    index = np.arange(count) % whole
    arrival = spread[index] + laps * span
    arrival -= arrival[0]
    if rate is not None:
        arrival = arrival * ((count - 1) / arrival[-1] / rate) if arrival[-1] else np.arange(count) / rate
    return arrival, prompts[order][index], answers[order][index]


def _spread(times: Floats, rng: np.random.Generator) -> Floats:
    values, first = np.unique(times, return_index=True)
    ends = np.append(values[1:], values[-1] + (np.median(np.diff(values)) if len(values) > 1 else 1.0))
    lasting = np.repeat(ends - values, np.diff(np.append(first, len(times))))
    return np.sort(times + rng.random(len(times)) * lasting)


def _lines(path: Path) -> tuple[Floats, Floats, Floats]:
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"the trace {path} cannot be read: {error}") from None
    if not rows:
        raise PlanError(f"the trace {path} is empty")
    table = np.array(rows, dtype=float)
    return (table[:, 0] - table[:, 0].min()) / 1000, table[:, 1], table[:, 2]


def _row(path: Path, number: int, line: str) -> tuple[float, float, float]:
    try:
        entry = json.loads(line)
        row = float(entry["timestamp"]), float(entry["input_length"]), float(entry["output_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path}, line {number}: a request has timestamp (ms), input_length and output_length ({error!r})"
        ) from None
    if not (row[0] >= 0 and row[1] >= 0 and row[2] >= 0 and max(row) < 1e15):
        raise PlanError(f"{path}, line {number}: timestamp and lengths must be numbers from 0 on")
    return row
