"""The abort storm: more requests than the pool can hold, slow writes, half of them cut at a random moment.

With the ledger's rule every survivor's answer equals the oracle's. With the pages freed at once it does not: late
writes of dead requests land in living ones. Both are measured by the same code.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest, Oracle

CUTS = ("queue", "offer", "mid-chunk", "landed", "decoding")


@dataclass(frozen=True)
class Plan:
    """`requests` in all, `in_flight` at a time, a seeded half of them cut."""

    seed: int = 1
    requests: int = 1000
    in_flight: int = 4  # the pool holds about two: two wait
    cut_share: float = 0.5
    prompts: int = 20  # distinct ones, so that the oracle is cheap
    prompt_tokens: tuple[int, int] = (40, 120)
    answer_tokens: int = 12
    vocab: tuple[int, int] = (8, 500)


@dataclass(eq=False)
class Cut:
    """When a request is cut: after a time, or once a number of tokens has been seen."""

    name: str
    after: float = 0.0
    at_tokens: int | None = None

    def due(self, request: LabRequest, now: float) -> bool:
        if self.at_tokens is not None:
            return len(request.tokens) >= self.at_tokens
        return now - request.started >= self.after


@dataclass
class Report:
    survivors: int = 0
    corrupted: list[LabRequest] = field(default_factory=list)
    failed: list[LabRequest] = field(default_factory=list)  # not cut, yet no answer
    cuts: Counter[str] = field(default_factory=Counter)
    ended_in_time: Counter[str] = field(default_factory=Counter)  # cut too late: it had finished
    many_ends: int = 0
    seconds: float = 0.0


def prompts_of(plan: Plan) -> list[list[int]]:
    draw = random.Random(plan.seed)
    return [
        [draw.randrange(*plan.vocab) for _ in range(draw.randint(*plan.prompt_tokens))] for _ in range(plan.prompts)
    ]


def _cut(draw: random.Random, plan: Plan, first_token: float) -> Cut:
    """`first_token`: seconds that requests took lately until theirs, so that the moment falls where it should."""
    name = draw.choice(CUTS)
    if name == "queue":
        return Cut(name, after=0.0)
    if name == "offer":
        return Cut(name, after=first_token * draw.uniform(0.2, 0.6))
    if name == "mid-chunk":
        return Cut(name, after=first_token * draw.uniform(0.6, 1.0))
    if name == "landed":
        return Cut(name, at_tokens=1)
    return Cut(name, at_tokens=draw.randint(2, max(2, plan.answer_tokens - 1)))


def run(
    cluster: Cluster,
    prefills: Sequence[str],
    decode: str,
    oracle: Oracle,
    plan: Plan,
    seconds: float = 600.0,
) -> Report:
    """Raises TimeoutError when a request does not end."""
    prompts = prompts_of(plan)
    expected = oracle(prompts)
    draw = random.Random(plan.seed + 1)
    sampling = Sampling(max_tokens=plan.answer_tokens, ignore_eos=True)
    todo = deque((index % plan.prompts, draw.random() < plan.cut_share) for index in range(plan.requests))
    running: dict[LabRequest, tuple[int, Cut | None]] = {}
    report, began, first_token = Report(), time.monotonic(), 0.05
    while todo or running:
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{len(running)} requests have not ended after {seconds} s; {len(todo)} not started")
        while todo and len(running) < plan.in_flight:
            prompt, cut = todo.popleft()
            prefill = prefills[draw.randrange(len(prefills))]
            request = cluster.start(prompts[prompt], sampling, (prefill, decode))
            running[request] = (prompt, _cut(draw, plan, first_token) if cut else None)
        cluster.turn()
        now = time.monotonic()
        for request, (prompt, plan_cut) in list(running.items()):
            if request.over:
                del running[request]
                _judge(report, request, expected[prompt], plan_cut)
                if request.first_token is not None:
                    first_token += 0.1 * (request.first_token - request.started - first_token)
            elif plan_cut is not None and not request.cancelled and plan_cut.due(request, now):
                report.cuts[plan_cut.name] += 1
                cluster.cancel(request)
    report.seconds = time.monotonic() - began
    return report


def _judge(report: Report, request: LabRequest, expected: list[int], cut: Cut | None) -> None:
    if any(len(ends) != 1 for ends in request.ends.values()):
        report.many_ends += 1
    if request.outcome == "length":
        if cut is not None:
            report.ended_in_time[cut.name] += 1
        report.survivors += 1
        if request.tokens != expected:
            report.corrupted.append(request)
    elif request.cancelled:
        if request.tokens != expected[: len(request.tokens)]:
            report.corrupted.append(request)
    else:
        report.failed.append(request)
