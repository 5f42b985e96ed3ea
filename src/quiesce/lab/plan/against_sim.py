"""The plan beside `quiesce sim`: the same small clusters and requests, counted there with the product's classes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quiesce.core.messages import Abort
from quiesce.lab.plan.course import Case, Course, Simulation, Sizes
from quiesce.lab.plan.requests import NEVER, Requests
from quiesce.lab.sim.cluster import Cluster
from quiesce.lab.sim.run import simulate
from quiesce.lab.sim.world import Noise, Req, World

BEGINS = 3.0  # seconds until the simulated workers have found one another
REQUESTS = 250
PAGE, CHUNK, RUNNING, STEP = 4, 64, 16, 0.02
DELAY = 0.1  # seconds of a message, one way
PAGE_SECONDS, POST_SECONDS = 0.004, 0.001


@dataclass(frozen=True)
class Compared:
    """`held` in page-seconds: pages times how long each was held. `wait`: mean seconds to admission."""

    name: str
    plan_held: float
    sim_held: float
    plan_holds: int
    plan_wait: float
    sim_wait: float | None

    @property
    def ratio(self) -> float:
        return self.plan_held / self.sim_held if self.sim_held else float("inf")

    def text(self) -> str:
        waits = "" if self.sim_wait is None else f"; wait {self.plan_wait:.2f} s and {self.sim_wait:.2f} s"
        return (
            f"{self.name}: {self.plan_held:,.1f} page-seconds held here, {self.sim_held:,.1f} there, ratio "
            f"{self.ratio:.2f} ({self.plan_holds} holds){waits}"
        )


def compare(seed: int) -> list[Compared]:
    """ABORTs answered, a third of all messages lost, a pool that is too small, and no ABORT answered at all."""
    roomy = _world(seed, pool=2000)
    calm = Case("answers come", ack=2 * DELAY, hold_timeout=roomy.hold_timeout, fence=0.0)
    silent = replace(calm, name="no answers, a fence", dead=(0.0, NEVER), disrupts=True)
    return [
        _one(roomy, calm),
        _one(replace(roomy, noise=replace(roomy.noise, loss=0.2)), replace(calm, name="messages lost", loss=0.36)),
        _one(_world(seed, pool=90), replace(calm, name="a small pool")),
        _one(roomy, silent, silent=True),
    ]


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


def _one(world: World, case: Case, *, silent: bool = False) -> Compared:
    cluster = Cluster(world)
    if silent:
        _unanswered(cluster)
    report = simulate(world, watch=cluster)
    if report.broken is not None:
        raise AssertionError(f"the simulated cluster broke a rule: {report.broken}")
    course = Simulation(requests_of(world), sizes_of(world), case).run()
    waits = report.waits
    return Compared(
        case.name,
        plan_held=held(course),
        sim_held=report.held.mean * report.seconds,
        plan_holds=len(course.holds),
        plan_wait=float(np.nanmean(course.delay)),
        sim_wait=sum(waits) / len(waits) if waits else None,
    )


def _unanswered(cluster: Cluster) -> None:
    """No ABORT arrives; everything else does."""
    carry = cluster.net.datagram

    def datagram(source: str, target: str, deliver: Any, message: Any) -> None:
        if not isinstance(message, Abort):
            carry(source, target, deliver, message)

    cluster.net.datagram = datagram  # type: ignore[method-assign]


def held(course: Course) -> float:
    return sum(pages * lasted for _, pages, lasted in course.holds)


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
