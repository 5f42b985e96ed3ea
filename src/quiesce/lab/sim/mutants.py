"""The product with one guard removed each, for guards that show in a whole cluster and not in a small world.

Those that the checker has as well are taken from there: the same patch, on the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quiesce.core.borrower import TABLE as BORROWER
from quiesce.core.borrower import Borrower, State
from quiesce.core.borrowing import Record
from quiesce.core.ledger import Ledger
from quiesce.core.lender import TABLE as LENDER
from quiesce.core.lender import Lender, Transfer
from quiesce.core.lender import State as Lending
from quiesce.core.machine import Fired, Send, Timer
from quiesce.core.messages import Abort
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Borrowing, LeaseKey
from quiesce.lab.mutants import MUTANTS as CHECKED
from quiesce.lab.mutants.patch import Change
from quiesce.lab.sim.world import Noise, World, world_of
from quiesce.roles import worker
from quiesce.roles.budgets import HoldBudget
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.worker import Worker
from quiesce.router.dispatch import Dispatcher

real_lend = Ledger.lend
real_fire = DecodeWorker.fire
real_unknown = Borrower._unknown
real_not_idle = Ledger.not_idle


@dataclass(frozen=True)
class SimMutant:
    """`guards` are removed by `changes`. `strict`: it shows as a lease that closes too early, before any damage.
    `quiet`: it shows where nothing else goes wrong and the engines are slow."""

    name: str
    guards: tuple[str, ...]
    about: str
    changes: tuple[Change, ...]
    strict: bool = False
    quiet: bool = False
    pull: bool = False

    def world(self, seed: int, requests: int) -> World:
        """The world in which a seed looks for it."""
        world = replace(world_of(seed, requests), direction="pull" if self.pull else "push")
        return (
            replace(world, noise=Noise(), faults=(), records=4096, chunk=world.page_size, step=0.1)
            if self.quiet
            else world
        )

    @contextmanager
    def made(self) -> Iterator[None]:
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change.made())
            yield


SIM_MUTANTS: list[SimMutant] = []


def mutant(
    name: str, guards: str, about: str, *where: tuple[Any, Any], strict: bool = False, quiet: bool = False
) -> Callable[[Any], Any]:
    """Decorates the replacement: `where` are the rows, methods or constants that it replaces."""

    def register(new: Any) -> Any:
        changes = tuple(Change(place, attribute, new) for place, attribute in where)
        SIM_MUTANTS.append(SimMutant(name, tuple(guards.split()), about, changes, strict, quiet))
        return new

    return register


# ---------------------------------------------------------------- holding


@mutant("H10", "H10", "who asks whether all is idle is not told of holds", (Ledger, "not_idle"))
def h10(self: Ledger) -> list[str]:
    return [line for line in real_not_idle(self) if " owned;" in line]


@mutant("H13", "H13", "timers wait while no request runs", (DecodeWorker, "fire"))
def h13(self: DecodeWorker, payload: object) -> None:
    assert isinstance(payload, Fired)
    if len(self.legs):
        real_fire(self, payload)
    else:
        self.timers.after(1.0, (payload.timer, payload.about), payload)


# ---------------------------------------------------------------- answers


@mutant("N8 busy", "N8", "while posts are under way, ABORT is not answered", (BORROWER, (State.CLOSING, Abort)))
def n8_busy(self: Borrower, record: Record, message: Abort) -> list[Any]:
    record.asked = True
    return []


@mutant("N8 tainted", "N8", "what is in doubt is not said", (BORROWER, (State.TAINTED, Abort)))
def n8_tainted(self: Borrower, record: Record, message: Abort) -> list[Any]:
    return []


# ---------------------------------------------------------------- admission


@mutant("D2", "D2", "a step under way is no lease", (Ledger, "lend"))
def d2(self: Ledger, key: LeaseKey, generation: int = 0, pages: Any = None) -> None:
    if key.kind is not Borrowing.COMPUTE:
        real_lend(self, key, generation, pages)


@mutant(
    "D4 no clock",
    "D4",
    "no wait has a clock",
    (Worker, "_deadline"),
    (Dispatcher, "_deadline"),
    (PrefillWorker, "_orphaned"),
    (LENDER, (Lending.OFFERED, Timer.DEADLINE)),
    (LENDER, (Lending.RESERVED, Timer.DEADLINE)),
)
def d4(self: Any, *about: Any) -> list[Any]:
    return []


@mutant(
    "D4 one clock",
    "D4",
    "who waits in the peer's queue is taken for one whose peer is silent",
    (LENDER, (Lending.OFFERED, Timer.REPEAT)),
    quiet=True,
)
def d4_one(self: Lender, transfer: Transfer, event: Fired) -> list[Any]:
    if transfer.repeats >= 6:
        return self._hold(transfer, "the prefill engine does not answer")
    return [Send(peer.offer.leg.p_epoch, peer.offer) for peer in transfer.published.values()] + self._again(transfer)


@mutant(
    "D6",
    "D6",
    "holds have no budget and take the rows of running requests",
    (worker, "PagePool"),
    (worker, "hold_budget"),
)
def d6(first: Any, *rest: Any) -> Any:
    if isinstance(first, int):
        return PagePool(first - worker.SPARE_ROWS if rest else first, *rest)
    return HoldBudget(1 << 30, 1 << 30, 1.0, now=lambda: 0.0)


@mutant("D7 bound", "D7", "what is remembered has no bound", (Borrower, "_unknown"))
def d7_bound(self: Borrower, message: Any) -> list[Any]:
    limit, self.max_records = self.max_records, 1 << 30
    try:
        return real_unknown(self, message)
    finally:
        self.max_records = limit


@mutant("D7 evict", "D7", "when the memory is full, the oldest is evicted", (Borrower, "_unknown"), strict=True)
def d7_evict(self: Borrower, message: Any) -> list[Any]:
    ended = (record for record in self.all_records() if record.state is not State.OPEN)
    if self.known >= self.max_records and (oldest := next(ended, None)) is not None:
        oldest.covered, oldest.posts = True, set()
        self._forget(oldest)
    return real_unknown(self, message)


CHECKED_TOO = ("H1", "H3 restart", "H11", "N3", "A9", "A4 + A5")
PULLED_TOO = ("H1 pull", "H11 pull", "A9 pull", "closed set pull")
SIM_MUTANTS[:0] = [
    SimMutant(one.name, one.guards, one.about, one.changes, one.name == "H1 pull", pull=one.name in PULLED_TOO)
    for one in CHECKED
    if one.name in CHECKED_TOO + PULLED_TOO
]
