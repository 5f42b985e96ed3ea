"""Runs one world from its first request until nothing is owed any more, and says what came of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from quiesce.lab.sim.cluster import FULL_CHECK, Broken, Cluster
from quiesce.lab.sim.edges import edges
from quiesce.lab.sim.gauge import Gauge
from quiesce.lab.sim.world import World, world_of

LOOK = 0.1  # virtual seconds between two looks whether it is over
SETTLES = 90.0  # seconds after the last request within which everything must be settled


@dataclass
class SimReport:
    """`held`: pages of all decode workers that wait for a proof, retained ones included. `broken`: None when every
    rule held. Times are virtual seconds, `spent` is real."""

    world: World
    broken: Broken | None = None
    seconds: float = 0.0
    spent: float = 0.0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # `answered`, or the HTTP status of the error
    closed_by: Counter[str] = field(default_factory=Counter)  # leases of decode workers, by proof
    held: Gauge = field(default_factory=Gauge)
    owned: Gauge = field(default_factory=Gauge)
    waits: list[float] = field(default_factory=list)  # of admitted requests: from arrival at decode to pages
    retained: int = 0  # pages still retained at the end
    messages: int = 0
    lost: int = 0
    restarts: int = 0
    retractions: int = 0


def simulate(world: World, *, strict: bool = True, watch: Cluster | None = None) -> SimReport:
    """Deterministic: the same world gives the same report."""
    cluster = watch or Cluster(world, strict)
    began = time.process_time()
    report = SimReport(world)
    cluster.held, cluster.owned = report.held, report.owned
    poll = 0.25 if world.fencing == "none" else 0.02
    with edges(cluster.time, cluster.chance, cluster.net, cluster.router.asyncio, poll, cluster.faults):
        cluster.start()
        _run(cluster, report)
    report.spent = time.process_time() - began
    _count(cluster, report)
    return report


def _run(cluster: Cluster, report: SimReport) -> None:
    loop, world = cluster.loop, cluster.world
    last = max((req.at for req in world.requests), default=0.0)
    last = max([last, *(fault.at + fault.seconds for fault in world.faults)])
    look = last
    while cluster.first_broken is None and _step(cluster):
        if loop.events % FULL_CHECK == 0:
            for process in cluster.processes.values():
                if process.alive:
                    process.shadow.check_all()
        if loop.now >= look:
            look = loop.now + LOOK
            if cluster.quiet():
                cluster.judge()
                break
            if loop.now > last + SETTLES + max(req.timeout for req in world.requests):
                cluster.give_up()
    report.broken = cluster.first_broken
    report.seconds = loop.now


def _step(cluster: Cluster) -> bool:
    """A worker's own faults are seen in its turn; what raises here is the router's, or the model's."""
    try:
        return cluster.loop.step()
    except Exception as error:
        cluster.raised(error, cluster.router)
        return False


def _count(cluster: Cluster, report: SimReport) -> None:
    report.held.end(report.seconds)
    report.owned.end(report.seconds)
    report.events = cluster.loop.events
    report.outcomes, report.waits = cluster.router.outcomes, cluster.waits
    report.messages, report.lost = cluster.net.sent, cluster.net.lost
    report.restarts = sum(cluster.restarts.values()) - len(cluster.restarts)
    for process in [*cluster.graves, *cluster.processes.values()]:
        if not process.prefill:
            report.closed_by += process.worker.ledger.closed_by
            report.retractions += process.worker.generation.retractions
            if process.alive:
                report.retained += process.worker.ledger.census().retained


def simulate_seed(seed: int, requests: int = 200) -> SimReport:
    return simulate(world_of(seed, requests))
