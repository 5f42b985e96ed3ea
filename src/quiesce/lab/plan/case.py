"""What a plan is asked about: how large a cluster is, what goes wrong in it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quiesce.lab.plan.requests import Floats


@dataclass(frozen=True)
class Sizes:
    """Seconds, pages, tokens a second."""

    prefills: int
    decodes: int
    page_size: int = 16
    prefill_pages: int = 32_768
    decode_pages: int = 65_536
    max_running: int = 64
    prefill_speed: float = 20_000.0
    decode_speed: float = 40.0
    chunk_pages: int = 128
    page_seconds: float = 0.0002
    window: int = 4
    max_retained: float = 0.25
    drain_timeout: float = 10.0
    restart: float = 30.0


@dataclass(frozen=True)
class Case:
    """`ack`: seconds from ABORT to its answer; `dead`: (from, to) in which none comes. `fence`: seconds, None: there
    is none; `disrupts`: it is the death of what writes for a prefill worker, so that every open hand-off of it fails.
    `storm`: (from, to, share). `holds` False: pages go back at once: unsafe, and only here to compare with."""

    name: str
    ack: float = 0.01
    loss: float = 0.0
    dead: tuple[float, float] | None = None
    hold_timeout: float = 30.0
    fence: float | None = 0.1
    disrupts: bool = False
    storm: tuple[float, float, float] | None = None
    holds: bool = True


@dataclass
class Course:
    """What happened. `held` and `times`: every change; retained pages are held too. `delay`: seconds to admission.
    `samples`: (time, most held since the one before, retained, promised to running requests, requests waiting)."""

    case: Case
    sizes: Sizes
    seconds: float  # of arrivals
    times: list[float] = field(default_factory=lambda: [0.0])
    held: list[int] = field(default_factory=lambda: [0])
    samples: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    delay: Floats = field(default_factory=lambda: np.empty(0))  # nan: never admitted
    first: Floats = field(default_factory=lambda: np.empty(0))  # seconds to the first token; nan: none
    holds: list[tuple[float, int, float]] = field(default_factory=list)  # began, pages, how long (inf: never ended)
    most_share: float = 0.0  # of one decode worker's pool that was held
    refused: int = 0  # larger than a pool
    cut: int = 0  # ended by a worker's restart or by a fence that disrupts
    restarts: int = 0
    events: int = 0
