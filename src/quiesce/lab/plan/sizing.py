"""How many workers of each role a workload needs, by what each of them runs out of first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from quiesce.lab.plan.case import Sizes
from quiesce.lab.plan.requests import Requests


@dataclass(frozen=True)
class Need:
    """`workers`: how many would be used to the full, on average, by this alone."""

    role: str
    what: str
    workers: float


def needs(requests: Requests, sizes: Sizes) -> list[Need]:
    """Little's law, one line a resource: arrivals a second times what one of them keeps for how long."""
    rate = requests.rate
    pages = np.ceil(requests.prompt / sizes.page_size)
    promise = np.ceil((requests.prompt + requests.answer) / sizes.page_size)
    computing = requests.prompt / sizes.prefill_speed
    sending = pages * sizes.page_seconds
    answering = requests.answer / sizes.decode_speed
    stay = computing + sending + answering
    return [
        Need("prefill", "computing prompts", rate * float(computing.mean())),
        Need("prefill", "writing pages", rate * float(sending.mean())),
        Need("prefill", "pages", rate * float((pages * (computing + sending)).mean()) / sizes.prefill_pages),
        Need("decode", "running requests", rate * float(stay.mean()) / sizes.max_running),
        Need("decode", "pages", rate * float((promise * stay).mean()) / sizes.decode_pages),
    ]


def binding(found: list[Need], role: str) -> Need:
    return max((need for need in found if need.role == role), key=lambda need: need.workers)


def workers(found: list[Need], role: str, target: float) -> int:
    return max(1, math.ceil(binding(found, role).workers / target))


def with_workers(requests: Requests, sizes: Sizes, target: float, prefill: int | None, decode: int | None) -> Sizes:
    """`sizes` with the workers that were asked for, or as many as are needed."""
    found = needs(requests, sizes)
    return replace(
        sizes,
        prefills=workers(found, "prefill", target) if prefill is None else prefill,
        decodes=workers(found, "decode", target) if decode is None else decode,
    )
