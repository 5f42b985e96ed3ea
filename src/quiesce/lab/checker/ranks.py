"""Two decode ranks under one leader (guard H8): the real `Leader` and `RankLender`, with whatever a network may do to
what they say to each other. What every rank does on its own is as in `model.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quiesce.core import lender as d
from quiesce.core.ledger import Ledger
from quiesce.core.machine import Action, Tell
from quiesce.core.messages import HandOff, Ping, TransferId
from quiesce.core.ranks import Entry, Leader, RankLender, Report
from quiesce.lab.checker.model import Model, Move
from quiesce.lab.checker.processes import State, Step
from quiesce.lab.checker.sides import PAIRING, DecodeSide, Event, Out
from quiesce.lab.invariants import RANKS
from quiesce.lab.worlds import World

APART, DIFFER = RANKS


class RankSide(DecodeSide):
    """One rank; the first one leads."""

    lender: RankLender

    def __init__(self, world: World, epoch: int, rank: int, peers: tuple[int, ...], reserved: int) -> None:
        super().__init__(world, epoch, rank, peers, reserved)
        self.lender = RankLender(epoch, self.ledger, rank=rank)
        self.leader = Leader(self.lender, world.decodes) if rank == 0 else None

    def step(self, world: World, event: Event) -> Out:
        match event:
            case ("reserve",):
                assert self.leader is not None
                pages = world.requests[self.reserved]
                ranks = dict(enumerate(self.peers))
                tid = self.leader.reserve(ranks, room=self.reserved, pairing=PAIRING, tokens=pages, pages=pages)
                assert tid is not None
                self.reserved += 1
                return self._do([], [])
            case ("hear", Entry() as entry, _):
                return self._do(self.lender.apply(entry), [])
            case ("hear", Report() as report, _):
                return self._do([] if self.leader is None else self.leader.hear(report), [])
            case ("end", tid) if self.leader is not None:
                return self._do(self.leader.end(tid, "aborted"), [])
            case ("repeat",):
                said: list[Any] = self.lender.repeats()
                if self.leader is not None:
                    said = [entry for _, entry in self.leader.repeats()]
                return self._do([], said)
        return super().step(world, event)

    def _do(self, actions: list[Action], sends: list[Any]) -> Out:
        if self.leader is not None:
            actions = self.leader.hear_own(actions)
            sends = [*sends, *self.leader.new()]
        sends = [*sends, *(self.lender.report(action) for action in actions if isinstance(action, Tell))]
        return super()._do(actions, sends)

    def may(self, world: World, exact: bool) -> list[Event]:
        events = super().may(world, exact)
        events = [event for event in events if event[0] != "publish" or self._reaches(event[1], event[2])]
        if self.leader is None:
            return [event for event in events if event[0] not in ("reserve", "end")]
        judged = self.leader.judged
        return [event for event in events if event[0] != "end" or judged[event[1]].decided in ("", "commit")]

    def _reaches(self, tid: TransferId, rank: int) -> bool:
        """The leader chose this peer; a rank offers once it has a session with it too."""
        return self.lender.transfers[tid].ranks[rank] in self.generations


class RanksModel(Model):
    decode_side = RankSide

    def _receivers(self, side: Any, message: HandOff | Ping) -> tuple[int, ...]:
        if isinstance(message, Entry):
            return tuple(range(1, self.world.decodes))
        return (0,) if isinstance(message, Report) else super()._receivers(side, message)

    def _message(self, message: Any, speaker: int, receiver: int) -> int:
        if isinstance(message, Report) and not self.paced:  # it only lets the leader say less often what is known
            message = msgspec.structs.replace(message, applied=0)
        return super()._message(message, speaker, receiver)

    def _verdict(self, side: Any, receiver: int, speaker: int, message: Any) -> str:
        if isinstance(message, Entry):
            mine = isinstance(side, RankSide) and side.rank == receiver
            return "never" if mine and (message.epoch != side.epoch or message.seq <= side.lender.applied) else ""
        if isinstance(message, Report):
            if self.paced or not isinstance(side, RankSide) or side.leader is None:
                return ""
            judged = None if message.tid is None else side.leader.judged.get(message.tid)
            if judged is None or message.epoch != side.epoch:
                return "never"
            over = message.rank in judged.proven if message.what == "proven" else judged.decided
            return "never" if over else ""
        return super()._verdict(side, receiver, speaker, message)

    # ------------------------------------------------------------ moves

    def _reserve(self, state: State) -> Iterator[Move]:
        if ("reserve",) in self.views[state[0][0]].may:
            yield self._apply(state, 0, ("reserve",))

    def _given_up_elsewhere(self, state: State, rank: int, tid: TransferId) -> bool:
        return False

    def heartbeat(self, state: State, rank: int) -> Iterator[Move]:
        """Ranks repeat for ever what is not answered: worth a move where the other rank did not know it."""
        yield from super().heartbeat(state, rank)
        said = self.local(state[0][rank], ("repeat",)).sends
        for at, side_id in enumerate(state[0]):
            bits = said & self.inbox[at]
            while bits:
                bit = bits & -bits
                bits ^= bit
                step = self.local(side_id, bit.bit_length() - 1)
                if step.side != side_id or step.sends:
                    yield self._merge(state, at, bit.bit_length() - 1, step)

    def _merge(
        self, state: State, at: int, event: Any, step: Step, spend: str | None = None, fair: bool = True
    ) -> Move:
        move = super()._merge(state, at, event, step, spend, fair)
        if move.state is None or at >= len(state[0]):
            return move
        wrong = self._divided([self.views[number].side for number in move.state[0]])
        return move if wrong is None else Move(move.event, None, wrong)

    def _divided(self, sides: list[RankSide]) -> str | None:
        known = [(tid, transfer.state) for side in sides for tid, transfer in side.lender.transfers.items()]
        committed = {tid for tid, now in known if now is d.State.COMMITTED}
        given_up = {tid for tid, now in known if now in (d.State.HOLDING, d.State.QUARANTINE)}
        if committed & given_up:
            return APART
        places: dict[int, tuple[frozenset[TransferId], int]] = {}
        for side in sides:
            books: Ledger = side.ledger
            here = frozenset(books._holdings), books.pool.free
            if places.setdefault(side.lender.applied, here) != here:
                return DIFFER
        return None

    # ------------------------------------------------------------ liveness

    def agreed(self, state: State) -> bool:
        """All have applied the whole log, and what is over everywhere has been released."""
        sides = [self.views[number].side for number in state[0]]
        if len({side.lender.applied for side in sides}) > 1:
            return False
        kept = {tid for side in sides for tid in side.ledger._holdings}
        return all(any(tid in side.lender.transfers for side in sides) for tid in kept)
