"""The successors of a global state: deliveries, steps of the processes, outcomes of posts, fences and crashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from quiesce.core import lender as d
from quiesce.core.borrower import Outcome
from quiesce.core.machine import Timer
from quiesce.core.messages import Leg, TransferId
from quiesce.lab.checker.processes import (
    BUDGETS,
    COVERED,
    FLYING,
    FOREIGN,
    GIVEN_UP,
    HALF,
    HOLE,
    LOOSE,
    REFUSED,
    RESULT,
    SOURCE,
    Event,
    Flight,
    Processes,
    State,
    Step,
)
from quiesce.lab.checker.sides import ANOTHER, DecodeSide, PrefillSide, token_of

UNFAIR = ("reserve", "end", "fault")  # a client, a router, bad luck: nobody may wait for them


class Move(NamedTuple):
    event: Event
    state: State | None  # None: the move itself breaks a rule
    broken: str | None = None
    fair: bool = True  # happens in the end, without luck, malice or a new request


class Model(Processes):
    """A world in motion. A sent message stays deliverable for ever: every delay, loss, duplicate and order."""

    # ------------------------------------------------------------ successors

    def moves(self, state: State) -> Iterator[Move]:
        yield from self._damage(state)
        yield from self._deliveries(state)
        decodes, prefills, _, _, _, budgets = state
        yield from self._reserve(state)
        for rank, side_id in enumerate(decodes):
            for event in self.views[side_id].may:
                if event[0] == "end":
                    yield self._apply(state, rank, event, fair=self._given_up_elsewhere(state, rank, event[1]))
                elif event[0] != "reserve":
                    yield self._apply(state, rank, event)
            yield from self._decode_moves(state, rank, side_id)
        for rank, side_id in enumerate(prefills):
            at = len(decodes) + rank
            for event in self.views[side_id].may:
                yield self._apply(state, at, event)
            yield from self._prefill_moves(state, at, side_id, budgets)
        yield from self._outcomes(state)
        yield from self._crashes(state)

    def _reserve(self, state: State) -> Iterator[Move]:
        """Every decode rank of the engine reserves the same request, or none does."""
        if not all(("reserve",) in self.views[number].may for number in state[0]):
            return
        move = Move((), state)
        for rank in range(len(state[0])):
            if move.state is not None:
                move = self._apply(move.state, rank, ("reserve",))
        yield move

    def _given_up_elsewhere(self, state: State, rank: int, tid: TransferId) -> bool:
        """Another rank of the same engine has given it up: the leader tells this one (guard H8 is not checked)."""
        for other, number in enumerate(state[0]):
            if other != rank:
                transfer = self.views[number].side.lender.transfers.get(tid)
                if transfer is None or transfer.state is d.State.HOLDING:
                    return True
        return False

    def _deliveries(self, state: State) -> Iterator[Move]:
        decodes, prefills, net, _, _, _ = state
        for at, side_id in enumerate(decodes + prefills):
            bits = net & self.inbox[at]
            while bits:
                bit = bits & -bits
                bits ^= bit
                number = bit.bit_length() - 1
                step = self.local(side_id, number)
                if step.side == side_id and not step.sends & ~net and not step.fault and not step.posts:
                    continue  # heard it, nothing new
                yield self._merge(state, at, number, step)

    def _apply(self, state: State, at: int, event: Event, spend: str | None = None, fair: bool | None = None) -> Move:
        side_id = (state[0] + state[1])[at]
        if fair is None:
            fair = spend is None and event[0] not in UNFAIR and event[:2] != ("fire", Timer.DEADLINE)
        return self._merge(state, at, event, self.local(side_id, event), spend, fair)

    def _merge(
        self, state: State, at: int, event: Any, step: Step, spend: str | None = None, fair: bool = True
    ) -> Move:
        decodes, prefills, net, posts, placed, budgets = state
        said = ("at", at, event)
        if step.fault:
            return Move(said, None, step.fault)
        if at < len(decodes):
            decodes = (*decodes[:at], step.side, *decodes[at + 1 :])
            for tid, result in step.commits:
                wrong = self._commit_fault(state, at, tid, result)
                if wrong:
                    return Move(said, None, wrong)
            if placed:
                placed = self._still_watched(placed, decodes)
        else:
            rank = at - len(decodes)
            prefills = (*prefills[:rank], step.side, *prefills[rank + 1 :])
        if step.posts:
            posts = tuple(sorted([*posts, *(self._launch(number, decodes, prefills) for number in step.posts)]))
        if spend:
            budgets = self._spend(budgets, spend)
        net |= step.sends
        if not self.keeps_late:
            net = self._forget_spent(decodes, prefills, net)
        return Move(said, (decodes, prefills, net, posts, placed, budgets), None, fair)

    def _spend(self, budgets: tuple[int, ...], name: str) -> tuple[int, ...]:
        i = BUDGETS.index(name)
        return (*budgets[:i], budgets[i] - 1, *budgets[i + 1 :])

    def _left(self, budgets: tuple[int, ...], name: str) -> bool:
        return budgets[BUDGETS.index(name)] > 0

    def _launch(self, number: int, decodes: tuple[int, ...], prefills: tuple[int, ...]) -> int:
        """A post as it leaves: refused at the target when its grant is of a dead epoch or a revoked generation."""
        flight = self.flights[number]
        view = self.views[decodes[flight.leg.d_rank]]
        old = flight.leg.tid.epoch != view.epoch
        revoked = flight.generation < view.generations.get(flight.leg.p_epoch, 0)
        leg, generation = flight.leg, flight.generation
        barred = {page for epoch, upto, page in view.side.barred if epoch == leg.p_epoch and upto >= generation}
        refused = old or revoked or set(flight.destination) <= barred
        return number * 4 + (REFUSED if refused else FLYING)

    def _commit_fault(self, state: State, at: int, tid: TransferId, result: Any) -> str | None:
        view = self.views[state[0][at]]
        if tid in view.side.given_up:
            return GIVEN_UP
        pages = [page for page, (owner, _) in view.holders.items() if owner == tid]
        for rank in range(self.world.prefills):
            if any((at, tid, rank, index) not in state[4] for index in range(len(pages))):
                return HOLE
        return None if result == token_of(tid, 0) else RESULT

    def _still_watched(self, placed: frozenset[Any], decodes: tuple[int, ...]) -> frozenset[Any]:
        """Bytes in pages that nobody will commit any more are no state."""
        keep = []
        for tag in placed:
            transfer = self.views[decodes[tag[0]]].side.lender.transfers.get(tag[1])
            if transfer is not None and transfer.state in (d.State.RESERVED, d.State.OFFERED, d.State.LANDED):
                keep.append(tag)
        return frozenset(keep) if len(keep) != len(placed) else placed

    # ------------------------------------------------------------ decode: peers, fences, digests, PING

    def _decode_moves(self, state: State, rank: int, side_id: int) -> Iterator[Move]:
        _, prefills, _, _, placed, budgets = state
        side: DecodeSide = self.views[side_id].side
        alive = {self.views[number].epoch for number in prefills}
        for peer, number in enumerate(prefills):
            epoch = self.views[number].epoch
            if side.peers[peer] != epoch:
                yield self._apply(state, rank, ("learn", peer, epoch))
            elif self._left(budgets, "suspect"):
                yield self._apply(state, rank, ("lost", epoch), "suspect")
        for epoch, generation, dead in side.revokes:
            gone = dead and epoch not in alive and self.world.gone
            if self.world.fence or gone:
                yield self._revoke(state, rank, (epoch, generation, dead), gone and not self.world.fence)
            if self.world.narrow:
                yield self._revoke(state, rank, (epoch, generation, dead), False, (0,))
            if not self.world.fence or self._left(budgets, "unfenced"):
                spend = "unfenced" if self.world.fence else None
                yield self._apply(state, rank, ("unfenced", epoch, generation, dead), spend)
        for report in side.reports:
            yield self._apply(state, rank, ("report", *report))
        for tid in side.verifying:
            yield self._verify(state, rank, side, tid, placed)
            if self._left(budgets, "stray"):
                yield self._stray(state, rank, side, tid)
        if self._left(budgets, "pings"):
            step = self.local(side_id, ("ping",))
            if self.views[step.side].side.said != side.said:
                yield self._apply(state, rank, ("ping",), "pings")

    def heartbeat(self, state: State, rank: int) -> Iterator[Move]:
        """Liveness: PINGs are repeated for ever, so one of them arrives."""
        ping = self.local(state[0][rank], ("ping",))
        decodes = (*state[0][:rank], ping.side, *state[0][rank + 1 :])
        for peer in range(self.world.prefills):
            at = len(decodes) + peer
            bits = ping.sends & self.inbox[at]
            number = bits.bit_length() - 1
            step = self.local(state[1][peer], number)
            # Worth a move only when it tells more than a new number.
            if len(self.views[step.side].side.borrower.records) != len(
                self.views[state[1][peer]].side.borrower.records
            ):
                yield self._merge((decodes, *state[1:]), at, number, step)

    def _revoke(
        self, state: State, rank: int, asked: tuple[int, int, bool], gone: bool, pages: tuple[int, ...] = ()
    ) -> Move:
        move = self._apply(state, rank, ("effect", *asked, gone, pages))
        if move.state is None:
            return move
        epoch, generation, _ = asked
        posts = []
        for post in move.state[3]:
            flight = self.flights[post >> 2]
            hit = flight.leg.p_epoch == epoch and flight.leg.d_rank == rank and flight.generation <= generation
            if not hit or (pages and not set(flight.destination) <= set(pages)):
                posts.append(post)
            elif post & 3 != LOOSE:
                posts.append((post & ~3) | REFUSED)
        return Move(move.event, (*move.state[:3], tuple(sorted(posts)), *move.state[4:]), None, True)

    def _verify(self, state: State, rank: int, side: DecodeSide, tid: TransferId, placed: frozenset[Any]) -> Move:
        pages = len(side.ledger.pages(tid))
        right = all((rank, tid, p, index) in placed for p in range(self.world.prefills) for index in range(pages))
        return self._apply(state, rank, ("verified", tid, right))

    def _stray(self, state: State, rank: int, side: DecodeSide, tid: TransferId) -> Move:
        """Somebody outside the rules wrote here and may write again: the digest shows it."""
        move = self._apply(state, rank, ("verified", tid, False), "stray")
        if move.state is None:
            return move
        epoch = side.peers[0]
        leg = Leg(tid, rank, 0, epoch)
        pages = side.ledger.pages(tid)
        number = self.intern_flight(Flight(leg, 0, pages, (), side.generations[epoch]))
        posts = tuple(sorted([*move.state[3], number * 4 + LOOSE]))
        return Move(move.event, (*move.state[:3], posts, *move.state[4:]), None, False)

    # ------------------------------------------------------------ prefill: faults, drains, new lenders

    def _prefill_moves(self, state: State, at: int, side_id: int, budgets: tuple[int, ...]) -> Iterator[Move]:
        side: PrefillSide = self.views[side_id].side
        epoch = self.views[state[0][0]].epoch
        if epoch not in side.borrower.lenders:
            yield self._apply(state, at, ("learn", epoch))
        for event in self.views[side_id].may:
            if event[0] == "pair" and self._left(budgets, "mispaired"):
                yield self._apply(state, at, ("pair", event[1], ANOTHER), "mispaired")
            if event[0] == "compute" and self._left(budgets, "short") and side.chunks[event[1]] == 0:
                yield self._apply(state, at, ("compute", event[1], True), "short")
        if self._left(budgets, "fault"):
            for leg in [leg for legs in side.opened.values() for leg in legs]:
                yield self._apply(state, at, ("fault", leg), "fault")
        for leg in side.drains:
            yield self._apply(state, at, ("drained", leg, False), fair=not self.world.drain)
            if self.world.drain:
                yield from self._drain(state, at, leg)

    def _drain(self, state: State, at: int, leg: Leg) -> Iterator[Move]:
        """What was posted earlier on this connection has landed or never will; not while a post still runs."""
        posts = []
        for post in state[3]:
            other = self.flights[post >> 2].leg
            mine = other.p_epoch == leg.p_epoch and other.d_rank == leg.d_rank and other.tid.epoch == leg.tid.epoch
            if mine and post & 3 != LOOSE:
                return
            if not mine:
                posts.append(post)
        yield self._apply((*state[:3], tuple(posts), *state[4:]), at, ("drained", leg, True))

    # ------------------------------------------------------------ posts

    def _outcomes(self, state: State) -> Iterator[Move]:
        _, _, _, posts, _, budgets = state
        for i, post in enumerate(posts):
            if i and posts[i - 1] == post:
                continue
            kind = post & 3
            if kind == FLYING and self.world.halves:
                yield self._half(state, i)
            if kind in (FLYING, HALF):
                yield self._ended(state, i, Outcome.PLACED)
                if self._left(budgets, "failed"):
                    yield self._ended(state, i, Outcome.FAILED_CLEAN, "failed")
                if self._left(budgets, "unknown"):
                    yield self._ended(state, i, Outcome.UNKNOWN, "unknown")
            elif kind == REFUSED:
                yield self._ended(state, i, Outcome.FAILED_CLEAN)

    def _half(self, state: State, i: int) -> Move:
        """Half of every page of it is where it belongs, and the rest may never come."""
        decodes, prefills, net, posts, placed, budgets = state
        flight = self.flights[posts[i] >> 2]
        after = tuple(sorted([*posts[:i], *posts[i + 1 :], (posts[i] & ~3) | HALF]))
        tags = [(*tag, "half") for tag in self._tags(flight)]
        placed = self._still_watched(placed.union(tags), decodes)
        return Move(("half", posts[i]), (decodes, prefills, net, after, placed, budgets))

    @staticmethod
    def _tags(flight: Any) -> list[tuple[Any, ...]]:
        leg = flight.leg
        return [(leg.d_rank, leg.tid, leg.p_rank, flight.first + k) for k in range(len(flight.destination))]

    def _ended(self, state: State, i: int, outcome: Outcome, spend: str | None = None) -> Move:
        decodes, prefills, net, posts, placed, budgets = state
        post = posts[i]
        flight = self.flights[post >> 2]
        leg = flight.leg
        rest = posts[:i] + posts[i + 1 :]
        if outcome is Outcome.UNKNOWN:
            rest = tuple(sorted([*rest, (post & ~3) | LOOSE]))
        if outcome is Outcome.PLACED:
            tags = self._tags(flight)
            placed = self._still_watched(placed.difference((*tag, "half") for tag in tags).union(tags), decodes)
        before = (decodes, prefills, net, rest, placed, budgets)
        return self._apply(before, len(decodes) + leg.p_rank, ("ended", leg, flight.first, outcome), spend)

    def _damage(self, state: State) -> Iterator[Move]:
        """Bytes that may land now and must not: the reader is shown the state where they have landed."""
        decodes, prefills, _, posts, _, _ = state
        for post in posts:
            if post & 3 == REFUSED:
                continue
            flight = self.flights[post >> 2]
            leg = flight.leg
            view = self.views[decodes[leg.d_rank]]
            for page in flight.destination:
                holder = view.holders.get(page)
                if holder is not None and (holder[0] != leg.tid or holder[1]):
                    yield Move(("lands", post, page, holder), None, FOREIGN)
            writer = self.views[prefills[leg.p_rank]]
            if writer.epoch == leg.p_epoch:
                for page in flight.source:
                    if writer.content.get(page, leg.tid) != leg.tid:
                        yield Move(("reads", post, page, writer.content[page]), None, SOURCE)
            writers = (leg.tid, (leg.tid, leg.p_rank, leg.p_epoch))
            if self.strict and not any(writer in view.covered for writer in writers):
                yield Move(("uncovered", post), None, COVERED)

    # ------------------------------------------------------------ crashes

    def _crashes(self, state: State) -> Iterator[Move]:
        decodes, prefills, net, posts, placed, budgets = state
        world = self.world
        if self._left(budgets, "crash_p"):
            for rank, side_id in enumerate(prefills):
                epoch = self.views[side_id].epoch
                left = []
                for post in posts:
                    if self.flights[post >> 2].leg.p_epoch != epoch or post & 3 == LOOSE:
                        left.append(post)
                    elif post & 3 != REFUSED:
                        left.append((post & ~3) | LOOSE)  # its bytes are in the network, nobody counts them now
                fresh = self._intern(PrefillSide(world, epoch + 1, rank, self.views[decodes[0]].epoch))
                new = (*prefills[:rank], fresh, *prefills[rank + 1 :])
                spent = self._spend(budgets, "crash_p")
                yield Move(
                    ("crash", "P", rank, epoch), (decodes, new, net, tuple(sorted(left)), placed, spent), None, False
                )
        if self._left(budgets, "crash_d"):
            epoch = self.views[decodes[0]].epoch
            peers = tuple(self.views[number].epoch for number in prefills)
            reserved = max(self.views[number].side.reserved for number in decodes)
            fresh_d = tuple(
                self._intern(self.decode_side(world, epoch + 1, r, peers, reserved)) for r in range(len(decodes))
            )
            spent = self._spend(budgets, "crash_d")
            after: State = (fresh_d, prefills, net, self._bound(posts), frozenset(), spent)
            yield Move(("crash", "D", 0, epoch), after, None, False)

    def _bound(self, posts: tuple[int, ...]) -> tuple[int, ...]:
        """Placement is bound to the epoch at the target: nothing of the old grants lands in the new memory."""
        return tuple(sorted((post & ~3) | REFUSED for post in posts if post & 3 != LOOSE))
