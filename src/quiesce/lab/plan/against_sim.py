"""The plan beside `quiesce sim`: the same small clusters and requests, counted there with the product's classes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quiesce.core.ledger import Holding, Ledger
from quiesce.core.messages import Abort, TransferId
from quiesce.core.proofs import Borrowing
from quiesce.lab.mutants.patch import Change
from quiesce.lab.plan.case import Case, Sizes
from quiesce.lab.plan.course import Simulation
from quiesce.lab.plan.requests import NEVER, Requests
from quiesce.lab.sim.cluster import Cluster
from quiesce.lab.sim.run import simulate
from quiesce.lab.sim.world import Noise, Req, World

BEGINS = 3.0  # seconds until the simulated workers have found one another
REQUESTS = 250
PAGE, CHUNK, RUNNING, STEP = 4, 64, 16, 0.02
DELAY = 0.1  # seconds of a message, one way
NARROW, WIDE = (0.75, 1.35), (0.6, 1.6)  # of the simulator's page-seconds; over 24 seeds 0.89 to 1.25 were seen
PAGE_SECONDS, POST_SECONDS = 0.004, 0.001


Held = tuple[float, int, float]  # began, pages, how long


@dataclass(frozen=True)
class Compared:
    """Holds that an ended hand-off left, in both."""

    name: str
    plan: list[Held]
    sim: list[Held]
    within: tuple[float, float] = NARROW

    @property
    def agrees(self) -> bool:
        low, high = self.within
        return low <= self.ratio <= high

    @property
    def ratio(self) -> float:
        """Of page-seconds: pages times how long each was held."""
        there = page_seconds(self.sim)
        return page_seconds(self.plan) / there if there else float("inf")

    def text(self) -> str:
        counts = " and ".join(_said(held) for held in (self.plan, self.sim))
        return f"{self.name}: {counts}; page-seconds {self.ratio:.2f} of the simulator's"


def _said(held: list[Held]) -> str:
    if not held:
        return "no hold"
    _, pages, lasted = (float(np.mean(column)) for column in zip(*held, strict=True))
    return f"{len(held)} holds of {pages:.1f} pages for {lasted:.3f} s"


def page_seconds(held: list[Held]) -> float:
    return sum(pages * lasted for _, pages, lasted in held)


def compare(seed: int, *, all_of_them: bool = True) -> list[Compared]:
    """ABORTs answered, and none answered at all; `all_of_them`: also a fifth of all messages lost, and a pool that is
    too small, of which the plan leaves more out."""
    roomy = _world(seed, pool=2000)
    calm = Case("answers come", ack=2 * DELAY, hold_timeout=roomy.hold_timeout, fence=0.0)
    silent = replace(calm, name="no answers, a fence", dead=(0.0, NEVER))
    found = [_one(roomy, calm), _one(roomy, silent, silent=True)]
    if all_of_them:
        lossy = replace(roomy, noise=replace(roomy.noise, loss=0.2))
        found.append(_one(lossy, replace(calm, name="messages lost", loss=0.36), within=WIDE))
        found.append(_one(_world(seed, pool=90), replace(calm, name="a small pool"), within=WIDE))
    return found


def _world(seed: int, pool: int) -> World:
    rng = random.Random(seed)
    made, at = [], BEGINS
    for number in range(REQUESTS):
        at += rng.expovariate(12.0)
        pages = tuple(number * 1000 + place for place in range(rng.randint(4, 16)))
        leaves = at + rng.expovariate(1 / 0.3) if rng.random() < 0.5 else None
        answer = rng.randint(4, 40)
        made.append(Req(number, at, pages, PAGE, answer, answer, leaves, timeout=60.0))
    return World(
        seed=seed,
        requests=tuple(made),
        noise=Noise(delay=DELAY),
        prefills=2,
        decodes=1,
        prefill_pages=400,
        decode_pages=pool,
        page_size=PAGE,
        chunk=CHUNK,
        max_running=RUNNING * 8,
        step=STEP,
        fencing="page",
        page_seconds=PAGE_SECONDS,
        post_seconds=POST_SECONDS,
        hold_timeout=3.0,
        max_retained=1.0,
    )


def _one(world: World, case: Case, *, silent: bool = False, within: tuple[float, float] = NARROW) -> Compared:
    cluster = Cluster(world)
    if silent:
        _unanswered(cluster)
    watched = Watched(cluster)
    with watched.watching():
        report = simulate(world, watch=cluster)
    if report.broken is not None:
        raise AssertionError(f"the simulated cluster broke a rule: {report.broken}")
    course = Simulation(requests_of(world), sizes_of(world), case).run()
    return Compared(case.name, course.holds, watched.held, within)


class Watched:
    """Notes every holding that ends while a peer may still write it, and how long it was kept for that."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.began: dict[tuple[int, TransferId], float] = {}  # prefill has a holding of the same id
        self.held: list[Held] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        end, release = Ledger.end, Ledger._release_if_free

        def ends(ledger: Ledger, tid: TransferId) -> bool:
            lent = any(key.kind is Borrowing.WRITE for key in ledger.leases(tid))
            if lent and ledger.owns(tid):
                self.began[id(ledger), tid] = self.cluster.loop.now
            return end(ledger, tid)

        def releases(ledger: Ledger, tid: TransferId, holding: Holding) -> bool:
            over = release(ledger, tid, holding)
            if over and (id(ledger), tid) in self.began:
                since = self.began.pop((id(ledger), tid))
                self.held.append((since, len(holding.pages), self.cluster.loop.now - since))
            return over

        with Change(Ledger, "end", ends).made(), Change(Ledger, "_release_if_free", releases).made():
            yield


def _unanswered(cluster: Cluster) -> None:
    """No ABORT arrives; everything else does."""
    carry = cluster.net.datagram

    def datagram(source: str, target: str, deliver: Any, message: Any) -> None:
        if not isinstance(message, Abort):
            carry(source, target, deliver, message)

    cluster.net.datagram = datagram  # type: ignore[method-assign]


def requests_of(world: World) -> Requests:
    count = len(world.requests)
    rng = np.random.default_rng(world.seed)
    leaves = [NEVER if req.abort_at is None else req.abort_at for req in world.requests]
    return Requests(
        arrival=np.array([req.at for req in world.requests]),
        prompt=np.array([float(len(req.pages) * world.page_size) for req in world.requests]),
        answer=np.array([float(req.answer) for req in world.requests]),
        leaves=np.array(leaves),
        storm=np.ones(count),
        storm_place=np.zeros(count),
        luck=rng.random(count),
    )


def sizes_of(world: World) -> Sizes:
    """A step takes half its time whatever is in it, and the rest by how full it is."""
    full = world.chunk / (world.chunk + world.max_running)
    return Sizes(
        prefills=world.prefills,
        decodes=world.decodes,
        page_size=world.page_size,
        prefill_pages=world.prefill_pages,
        decode_pages=world.decode_pages,
        max_running=world.max_running,
        prefill_speed=world.chunk / (world.step * (0.5 + full)),
        decode_speed=1 / (world.step * 0.55),
        chunk_pages=world.chunk // world.page_size,
        page_seconds=world.page_seconds,
    )
