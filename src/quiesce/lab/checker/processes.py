"""Frozen processes and what one step does to them, by the real classes.

A global state is a tuple of small integers: frozen processes, messages and posts are interned, and a process's
step is computed once, by the real classes, for each (frozen process, event). That makes the search fast without
a copy of any rule: forgetting the cache changes nothing but the time.

state = (decode ids, prefill ids, sent messages as a bit set, posts, placed, budgets)
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from quiesce.core import borrower as b
from quiesce.core import lender as d
from quiesce.core.machine import Post, Timer
from quiesce.core.messages import Accept, Ack, Busy, Done, Failed, HandOff, Leg, Ping, TransferId
from quiesce.core.proofs import Borrowing
from quiesce.lab.checker.freeze import COUNTED, NOT_STATE, PACING, freeze, plain
from quiesce.lab.checker.sides import DecodeSide, PrefillSide
from quiesce.lab.invariants import GLOBAL, broken
from quiesce.lab.worlds import World

Event = tuple[Any, ...]
State = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], frozenset[Any], tuple[int, ...]]
FOREIGN, SOURCE, COVERED, READABLE, HOLE, RESULT, GIVEN_UP, LATE, RAISES = GLOBAL
BUDGETS = (
    "unknown",
    "failed",
    "fault",
    "crash_p",
    "crash_d",
    "suspect",
    "unfenced",
    "pings",
    "stray",
    "short",
    "mispaired",
)
# no outcome yet; refused by a fence; ended UNKNOWN or orphaned, may still land; no outcome yet, half of it is there
FLYING, REFUSED, LOOSE, HALF = 0, 1, 2, 3


class Flight(NamedTuple):
    """One post as the network sees it."""

    leg: Leg
    first: int
    destination: tuple[int, ...]
    source: tuple[int, ...]
    generation: int


class Step(NamedTuple):
    side: int
    sends: int  # bit set of interned messages
    posts: tuple[int, ...]
    commits: tuple[Any, ...]
    fault: str | None


class View(NamedTuple):
    """What the search needs to know of a frozen process, looked up once."""

    epoch: int
    may: tuple[Event, ...]
    holders: dict[int, tuple[TransferId, bool]]  # page -> (transfer, is a running request reading it)
    covered: frozenset[Any]  # legs with an open write lease; transfers with a foreign one
    content: dict[int, TransferId]
    generations: dict[int, int]
    side: Any


class Processes:
    """`strict` also wants every byte in flight covered by a lease; without it only visible damage counts.
    `paced` keeps what decides how often something is repeated: liveness needs it."""

    decode_side: type[DecodeSide] = DecodeSide

    def __init__(self, world: World, *, strict: bool = True, paced: bool = False) -> None:
        self.world = world
        self.strict = strict
        self.paced = paced
        self.sides: list[bytes] = []
        self.views: list[View] = []
        self._side_ids: dict[Any, int] = {}
        self.messages: list[tuple[int, int, HandOff | Ping]] = []  # (receiver, speaker's epoch, message)
        self._message_ids: dict[Any, int] = {}
        self.inbox: list[int] = [0] * (world.decodes + world.prefills)  # receiver -> mask of its messages
        self.flights: list[Any] = []  # of Flight, in pull of Read
        self._flight_ids: dict[Any, int] = {}
        self.keeps_late = world.late or world.exact
        self.exact = paced or world.exact
        self._unsaid: tuple[type, ...]
        if world.exact:
            self.without, self._unsaid = NOT_STATE, ()
        elif paced:
            self.without, self._unsaid = NOT_STATE | COUNTED, (Busy,)
        else:
            self.without, self._unsaid = NOT_STATE | COUNTED | PACING, (Accept, Busy)
        self.unarmed = self._pointless_timers()
        self._spent: dict[int, tuple[int, int, int]] = {}  # side -> (messages looked at, masks)
        self._over: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
        self._steps: dict[tuple[int, Any], Step] = {}
        self.real_steps = 0

    # ------------------------------------------------------------ interning

    def start(self) -> State:
        world = self.world
        peers = tuple(100 * (rank + 1) for rank in range(world.prefills))
        decodes = tuple(self._intern(self.decode_side(world, 1, rank, peers, 0)) for rank in range(world.decodes))
        prefills = tuple(self._intern(PrefillSide(world, epoch, rank, 1)) for rank, epoch in enumerate(peers))
        budgets = tuple(getattr(world, name) for name in BUDGETS)
        return decodes, prefills, 0, (), frozenset(), budgets

    def _pointless_timers(self) -> tuple[Timer, ...]:
        """Liveness waits for no deadline; and where nothing can be revoked, asking for it leads nowhere."""
        if not self.paced:
            return ()
        revocable = self.world.fence or self.world.gone
        return (Timer.DEADLINE,) if revocable else (Timer.DEADLINE, Timer.HOLD, Timer.REFENCE)

    def _intern(self, side: DecodeSide | PrefillSide) -> int:
        key = (type(side), freeze(side, self.without))
        known = self._side_ids.get(key)
        if known is None:
            view = self._view(side)
            known = self._side_ids[key] = len(self.sides)
            self.sides.append(pickle.dumps(side))
            self.views.append(view)
        return known

    def thaw(self, side_id: int) -> DecodeSide | PrefillSide:
        """A live process of its own, in that state."""
        side: DecodeSide | PrefillSide = pickle.loads(self.sides[side_id])
        return side

    def _view(self, side: DecodeSide | PrefillSide) -> View:
        may = tuple(side.may(self.world, self.exact))
        if isinstance(side, PrefillSide):
            return View(side.epoch, may, {}, frozenset(), dict(side.content), {}, side)
        running = {t.tid for t in side.lender.transfers.values() if t.state is d.State.COMMITTED}
        holders = {
            page: (tid, tid in running) for tid, holding in side.ledger._holdings.items() for page in holding.pages
        }
        covered: set[Any] = set()
        for lease in side.ledger.open_leases():
            key = lease.key
            covered.add(key.tid if key.kind is Borrowing.FOREIGN else (key.tid, key.rank, key.epoch))
        return View(side.epoch, may, holders, frozenset(covered), {}, dict(side.generations), side)

    def _message(self, message: HandOff | Ping, speaker: int, receiver: int) -> int:
        key = (receiver, speaker, message)
        known = self._message_ids.get(key)
        if known is None:
            known = self._message_ids[key] = len(self.messages)
            self.messages.append(key)
            self.inbox[receiver] |= 1 << known
        return known

    def _flight(self, post: Post) -> int:
        grant = post.grant
        first = grant.pages.index(post.destination[0])
        return self.intern_flight(Flight(post.leg, first, post.destination, post.source, grant.generation))

    def intern_flight(self, flight: Any) -> int:
        known = self._flight_ids.get(flight)
        if known is None:
            known = self._flight_ids[flight] = len(self.flights)
            self.flights.append(flight)
        return known

    # ------------------------------------------------------------ one step of one process, by the real classes

    def local(self, side_id: int, event: Any) -> Step:
        key = (side_id, event)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._run(side_id, event)
        return step

    def _run(self, side_id: int, event: Any) -> Step:
        self.real_steps += 1
        side = self.thaw(side_id)
        if isinstance(event, int):
            _, speaker, message = self.messages[event]
            event = ("hear", message, speaker)
        late = self._is_late(side, event)
        try:
            out = side.step(self.world, event)
            side.timers -= {timer for timer in side.timers if timer[0] in self.unarmed}
            fault = broken(side)
            new = self._intern(side)
        except Exception as error:
            return Step(side_id, 0, (), (), f"{RAISES}: {type(error).__name__}: {error}")
        if late and new != side_id and self.strict:
            fault = LATE
        sends = 0
        for message in out.sends:
            if isinstance(message, self._unsaid):
                continue
            for receiver in self._receivers(side, message):
                sends |= 1 << self._message(plain(message), side.epoch, receiver)
        return Step(new, sends, tuple(self._flight(post) for post in out.posts), out.commits, fault)

    def _is_late(self, side: DecodeSide | PrefillSide, event: Event) -> bool:
        if not isinstance(side, DecodeSide) or event[0] != "hear" or not hasattr(event[1], "leg"):
            return False
        return event[1].leg.tid not in side.lender.transfers

    def _receivers(self, side: DecodeSide | PrefillSide, message: HandOff | Ping) -> tuple[int, ...]:
        first = self.world.decodes
        if isinstance(message, Ping):
            return tuple(range(first, first + self.world.prefills))
        if isinstance(side, DecodeSide):
            return (first + message.leg.p_rank,)
        return (message.leg.d_rank,)

    # ------------------------------------------------------------ messages that are over

    def _forget_spent(self, decodes: tuple[int, ...], prefills: tuple[int, ...], net: int) -> int:
        """Without the messages that can never change anything again. Mutants and `late` worlds keep them."""
        seen, over = self._over.get((decodes, prefills), (0, 0))
        if seen < len(self.messages):
            never, answered, deaf = 0, 0, 0
            for side_id in decodes + prefills:
                mine, if_both = self._verdicts(side_id)
                never |= mine
                if side_id in decodes:
                    answered |= if_both
                else:
                    deaf |= if_both
            over = never | (answered & deaf)
            self._over[decodes, prefills] = len(self.messages), over
        return net & ~over

    def _verdicts(self, side_id: int) -> tuple[int, int]:
        seen, mine, if_both = self._spent.get(side_id, (0, 0, 0))
        for number in range(seen, len(self.messages)):
            verdict = self._verdict(self.views[side_id].side, *self.messages[number])
            mine |= (verdict == "never") << number
            if_both |= (verdict == "if both") << number
        self._spent[side_id] = len(self.messages), mine, if_both
        return mine, if_both

    def _verdict(self, side: Any, receiver: int, speaker: int, message: Any) -> str:
        """Ids are never used again, so an answer about a closed transfer is over; an ACK is over once the record
        has moved on; DONE and FAILED are over when only such an ACK could come of them."""
        if isinstance(message, Ping):
            return ""
        leg = message.leg
        if isinstance(side, DecodeSide):
            closed = leg.tid not in side.lender.transfers and (leg.tid.epoch, leg.tid.seq) <= (
                side.epoch,
                side.lender.high,
            )
            if receiver != side.rank or not closed:
                return ""
            return "if both" if isinstance(message, Done | Failed) else "never"
        if leg.p_rank != side.rank:
            return ""
        record = side.borrower.record(leg)
        deaf = leg.p_epoch != side.epoch or (
            record is not None and record.state not in (b.State.OPEN, b.State.DONE) and not self.exact
        )
        if not deaf or not isinstance(message, Ack | Done | Failed):
            return ""
        return "never" if isinstance(message, Ack) else "if both"
