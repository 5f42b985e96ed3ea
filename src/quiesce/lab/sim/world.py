"""What one seed decides: the cluster, its pools, its NIC, its requests and everything that goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from quiesce.lab.sim.trace import shapes

Fencing = Literal["death", "peer", "page", "none"]
FENCES = {"death": "a mover's death", "peer": "a peer at once", "page": "pages of a grant", "none": "no fence"}
FaultKind = Literal["crash", "pause", "partition", "storm", "stall", "mover"]


@dataclass(frozen=True, slots=True)
class Noise:
    """What goes wrong by itself, each with its own probability for a message or a post."""

    loss: float = 0.0
    copies: float = 0.0
    late: float = 0.0
    lateness: float = 0.0  # seconds that a late message may take
    delay: float = 0.001  # of a message, seconds
    ordered: float = 0.0005  # delay of what the router and workers say, seconds
    unknown: float = 0.0  # a post whose outcome nobody knows; what lands of it may land later
    failed: float = 0.0  # a post that fails clean, part of it placed
    raised: float = 0.0  # a post whose call raises after it was taken
    slow: float = 0.0  # a post that takes long
    engine: float = 0.0  # a row that the engine cannot compute
    refused_fence: float = 0.0


@dataclass(frozen=True, slots=True)
class Req:
    """One request of a client. `pages`: what is in each page of the prompt, `tail`: tokens in the last one."""

    number: int
    at: float
    pages: tuple[int, ...]
    tail: int
    answer: int
    most: int  # max_tokens; the answer stops before it
    abort_at: float | None = None
    samples: int = 1
    timeout: float = 30.0

    def tokens(self, page_size: int) -> tuple[int, ...]:
        """Each page is filled with its own number; the last one is this request's alone."""
        full = [number for number in self.pages[:-1] for _ in range(page_size)]
        return tuple(full + [(self.number + 1) << 40] * self.tail)


@dataclass(frozen=True, slots=True)
class Fault:
    """`who`: the worker, or the two that are cut off from each other."""

    at: float
    kind: FaultKind
    who: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class World:
    seed: int
    requests: tuple[Req, ...]
    faults: tuple[Fault, ...] = ()
    noise: Noise = field(default_factory=Noise)
    prefills: int = 1
    decodes: int = 1
    prefill_pages: int = 256
    decode_pages: int = 256
    page_size: int = 4  # tokens
    chunk: int = 64  # tokens that one step computes of prompts
    max_running: int = 16
    max_queued: int = 512
    conservativeness: float = 1.0
    reserve: Literal["early", "late"] = "early"
    step: float = 0.02  # seconds of an engine step
    direction: Literal["push", "pull"] = "push"
    fencing: Fencing = "death"
    drains: bool = True  # the transport can say that a connection is drained
    page_seconds: float = 0.0002  # on the wire
    post_seconds: float = 0.001  # of a post, whatever its size
    hold_timeout: float = 3.0
    max_retained: float = 0.25
    records: int = 4096  # transfers that a prefill engine remembers
    same_address: bool = True  # a worker that starts again is where its predecessor was
    supervised: bool = True  # the router is told of deaths
    skew: float = 0.0  # clocks run faster or slower by up to this share

    @property
    def workers(self) -> list[str]:
        return [f"P{i}" for i in range(self.prefills)] + [f"D{i}" for i in range(self.decodes)]

    def about(self) -> str:
        """One line for people."""
        fence = FENCES[self.fencing]
        sizes = f"{self.prefill_pages}/{self.decode_pages} pages of {self.page_size} tokens"
        faults = ", ".join(f"{kind} {n}" for kind, n in sorted(_count(self.faults).items())) or "no faults"
        what = f"{self.direction}, {self.prefills}P{self.decodes}D, {sizes}, {len(self.requests)} requests"
        return f"{what}, fence: {fence}, {faults}"


def _count(faults: tuple[Fault, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for fault in faults:
        found[fault.kind] = found.get(fault.kind, 0) + 1
    return found


def world_of(seed: int, requests: int = 200) -> World:
    """The world of a seed. The same seed and number of requests always give the same world."""
    rng = random.Random(seed)
    calm = rng.random() < 0.15
    prefills, decodes = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    page_size = rng.choice((1, 2, 4, 4, 8))
    most_pages = rng.randint(4, 16)
    step = rng.choice((0.01, 0.02, 0.03))
    most_answer = rng.randint(8, 48)
    rate = decodes * rng.uniform(3.0, 12.0)
    hold = rng.choice((0.5, 1.0, 2.0, 4.0))
    made: list[Req] = []
    at, aborts = 0.5, 0.0 if calm else rng.choice((0.0, 0.1, 0.3, 0.6))
    found = shapes(
        rng, requests, rate=rate, median_pages=rng.uniform(2, 6), most_pages=most_pages, most_answer=most_answer
    )
    for number, shape in enumerate(found):
        at += shape.gap + rng.random() * 0.02
        leaves = at + rng.expovariate(3.0) if rng.random() < aborts else None
        tail = max(1, round(shape.tail * page_size))
        most = max(shape.answer, rng.choice((shape.answer, most_answer)))
        samples = rng.choice((2, 3)) if rng.random() < 0.05 else 1
        timeout = rng.choice((8.0, 20.0, 20.0)) if rng.random() < 0.9 else rng.uniform(0.2, 2.0)
        made.append(Req(number, at, shape.pages, tail, shape.answer, most, leaves, samples, timeout))
    need = most_pages + -(-most_answer // page_size) + 1
    world = World(
        seed=seed,
        requests=tuple(made),
        direction="pull" if random.Random(seed + 1).random() < 0.3 else "push",
        prefills=prefills,
        decodes=decodes,
        prefill_pages=need * rng.randint(1, 6),
        decode_pages=need * rng.randint(1, 8),
        page_size=page_size,
        chunk=page_size * rng.choice((1, 3, 8, 32)),
        max_running=rng.choice((2, 8, 16, 32)),
        conservativeness=rng.choice((0.0, 0.3, 1.0)),
        reserve=rng.choice(("early", "early", "late")),
        step=step,
        fencing=rng.choice(("death", "death", "peer", "page", "none")),
        drains=rng.random() < 0.5,
        page_seconds=rng.choice((0.0001, 0.0005, 0.002)),
        hold_timeout=hold,
        max_retained=rng.choice((0.25, 0.5)),
        records=4096 if calm else rng.choice((4096, 4096, 24, 8)),
        same_address=rng.random() < 0.7,
        supervised=rng.random() < 0.5,
        skew=0.0 if calm else rng.choice((0.0, 0.01, 0.1)),
        noise=Noise() if calm else _noise(rng),
    )
    return world if calm else _with_faults(world, rng, at)


def _noise(rng: random.Random) -> Noise:
    def maybe(most: float) -> float:
        return rng.random() * most if rng.random() < 0.6 else 0.0

    return Noise(
        loss=maybe(0.15),
        copies=maybe(0.2),
        late=maybe(0.2),
        lateness=rng.choice((0.05, 0.5, 3.0)),
        delay=rng.choice((0.0005, 0.002, 0.02)),
        ordered=rng.choice((0.0005, 0.0005, 0.01, 0.1)),
        unknown=maybe(0.05),
        failed=maybe(0.05),
        raised=maybe(0.02),
        slow=maybe(0.05),
        engine=maybe(0.01),
        refused_fence=maybe(0.5),
    )


def _with_faults(world: World, rng: random.Random, until: float) -> World:
    faults = []
    for kind in ("crash", "pause", "partition", "storm", "stall", "mover"):
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            who: tuple[str, ...] = (rng.choice(world.workers),)
            if kind == "partition":
                who = (rng.choice(world.workers[: world.prefills]), rng.choice(world.workers[world.prefills :]))
                if rng.random() < 0.3:
                    who = ("router", rng.choice(world.workers))
            elif kind in ("stall", "mover"):
                who = (rng.choice(world.workers[: world.prefills]),)
            elif kind == "storm":
                who = ()
            seconds = rng.choice((0.1, 0.5, 2.0, 6.0)) * (0.5 + rng.random())
            faults.append(Fault(rng.uniform(0.5, until), kind, who, seconds))
    return replace(world, faults=tuple(sorted(faults, key=lambda fault: fault.at)))
