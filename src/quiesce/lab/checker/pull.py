"""Pull in motion: reads take what is in a source page at one moment and land at a later one.

A read is refused by a fence of either side; it outlives the engine that it reads from, and what answers then is
whoever runs there. Answers land only in the epoch that posted them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from quiesce.core import lender as d
from quiesce.core.borrower import Outcome
from quiesce.core.machine import Post
from quiesce.core.messages import Abort, Failed, Leg, Offer, Ping, Request, TransferId
from quiesce.core.proofs import Borrowing
from quiesce.lab.checker.model import Model, Move
from quiesce.lab.checker.processes import (
    COVERED,
    FLYING,
    FOREIGN,
    HALF,
    LOOSE,
    READABLE,
    REFUSED,
    SOURCE,
    State,
    View,
)
from quiesce.lab.checker.pull_sides import ReadingSide, SourceSide
from quiesce.lab.checker.ranks import RanksModel
from quiesce.lab.worlds import World


class Read(NamedTuple):
    """One read as the network sees it. `taken`: page by page, was it the right prompt; None before that."""

    leg: Leg
    first: int
    destination: tuple[int, ...]
    source: tuple[int, ...]
    generation: int
    taken: tuple[bool, ...] | None = None


class PullModel(Model):
    # ------------------------------------------------------------ processes

    def start(self) -> State:
        _, _, net, posts, placed, budgets = super().start()
        peers = tuple(100 * (rank + 1) for rank in range(self.world.prefills))
        decode = self._intern(ReadingSide(self.world, 1, 0, peers, 0))
        prefills = tuple(self._intern(SourceSide(self.world, epoch, rank, 1)) for rank, epoch in enumerate(peers))
        return (decode,), prefills, net, posts, placed, budgets

    def _view(self, side: Any) -> View:
        view = super()._view(side)
        if not isinstance(side, SourceSide):
            return view
        leases = [lease.key for lease in side.sources.open_leases() if lease.key.kind is Borrowing.READ]
        return view._replace(covered=frozenset((key.tid, key.rank, key.epoch) for key in leases))

    def _flight(self, post: Post) -> int:
        first = post.grant.pages.index(post.source[0])
        return self.intern_flight(Read(post.leg, first, post.destination, post.source, post.grant.generation))

    def _verdict(self, side: Any, receiver: int, speaker: int, message: Any) -> str:
        """What is said about an id that is over where it is heard changes nothing there; its answer is over once the
        other side is deaf to it. Ids are never used again."""
        if isinstance(message, Ping):
            return ""
        leg = message.leg
        to_reader = receiver == 0
        if isinstance(side, ReadingSide):
            if leg.tid.epoch == side.epoch and (leg.tid.seq > side.lender.high or leg.tid in side.lender.transfers):
                return ""
            never = to_reader and (leg.tid.epoch != side.epoch or not isinstance(message, Offer | Abort))
        else:
            if leg.p_rank != side.rank or (leg.p_epoch == side.epoch and not side.over(leg)):
                return ""
            never = not to_reader and not isinstance(message, Request | Failed)
        return "never" if never else "if both"

    def _source(self, prefills: tuple[int, ...], leg: Leg) -> View | None:
        """The engine that the read was posted to, while it lives."""
        view = self.views[prefills[leg.p_rank]]
        return view if view.epoch == leg.p_epoch else None

    # ------------------------------------------------------------ reads

    def _launch(self, number: int, decodes: tuple[int, ...], prefills: tuple[int, ...]) -> int:
        """A read as it leaves: refused when a fence of either side covers its generation."""
        read = self.flights[number]
        reader, source = self.views[decodes[0]], self._source(prefills, read.leg)
        own = read.generation < reader.generations.get(read.leg.p_epoch, 0)
        theirs = source is not None and read.generation <= source.side.fenced.get(read.leg.tid.epoch, 0)
        return number * 4 + (REFUSED if own or theirs else FLYING)

    def _outcomes(self, state: State) -> Iterator[Move]:
        _, prefills, _, posts, _, budgets = state
        for i, post in enumerate(posts):
            read, kind = self.flights[post >> 2], post & 3
            dead = self._source(prefills, read.leg) is None
            if kind == REFUSED:
                yield self._ended(state, i, Outcome.FAILED_CLEAN)
            if kind not in (FLYING, HALF):
                continue
            if read.taken is None:
                if not dead or self.world.successor:
                    yield self._take(state, i)
            else:
                if kind == FLYING and self.world.halves:
                    yield self._half(state, i)
                yield self._ended(state, i, Outcome.PLACED)
            if dead or self._left(budgets, "failed"):
                yield self._ended(state, i, Outcome.FAILED_CLEAN, None if dead else "failed")
            if self._left(budgets, "unknown"):
                yield self._ended(state, i, Outcome.UNKNOWN, "unknown")

    def _take(self, state: State, i: int) -> Move:
        """The bytes leave the source page: whatever is in it now, of whoever runs there now."""
        decodes, prefills, net, posts, placed, budgets = state
        read = self.flights[posts[i] >> 2]
        content = self.views[prefills[read.leg.p_rank]].content
        same = self._source(prefills, read.leg) is not None
        right = tuple(same and content.get(page) == read.leg.tid for page in read.source)
        number = self.intern_flight(read._replace(taken=right))
        after = tuple(sorted([*posts[:i], *posts[i + 1 :], number * 4 + FLYING]))
        return Move(("takes", posts[i], right), (decodes, prefills, net, after, placed, budgets))

    def _ended(self, state: State, i: int, outcome: Outcome, spend: str | None = None) -> Move:
        decodes, prefills, net, posts, placed, budgets = state
        read = self.flights[posts[i] >> 2]
        leg = read.leg
        rest = posts[:i] + posts[i + 1 :]
        if outcome is Outcome.UNKNOWN:
            rest = tuple(sorted([*rest, (posts[i] & ~3) | LOOSE]))
        if outcome is Outcome.PLACED:
            right = [k for k, mine in enumerate(read.taken or ()) if mine]
            halves = ((*tag, "half") for tag in self._tags(read))
            tags = [(leg.d_rank, leg.tid, leg.p_rank, read.first + k) for k in right]
            placed = self._still_watched(placed.difference(halves).union(tags), decodes)
        before = (decodes, prefills, net, rest, placed, budgets)
        return self._apply(before, leg.d_rank, ("ended", leg, read.first, outcome), spend)

    def _damage(self, state: State) -> Iterator[Move]:
        decodes, prefills, _, posts, _, _ = state
        for post in posts:
            if post & 3 == REFUSED:
                continue
            read = self.flights[post >> 2]
            leg, view = read.leg, self.views[decodes[0]]
            for page in read.destination:
                holder = view.holders.get(page)
                if holder is not None and (holder[0] != leg.tid or holder[1]):
                    yield Move(("lands", post, page, holder), None, FOREIGN)
            if self.strict and (leg.tid, leg.p_rank, leg.p_epoch) not in view.covered:
                yield Move(("uncovered", post), None, COVERED)
            source = self._source(prefills, leg)
            if read.taken is not None or source is None:
                continue  # what a successor answers is what the check after landing is for
            for page in read.source:
                if source.content.get(page) != leg.tid:
                    yield Move(("reads", post, page, source.content[page]), None, SOURCE)
            if self.strict and (leg.tid, leg.d_rank, leg.tid.epoch) not in source.covered:
                yield Move(("unlent", post), None, READABLE)

    # ------------------------------------------------------------ decode

    def _decode_moves(self, state: State, rank: int, side_id: int) -> Iterator[Move]:
        _, prefills, _, _, _, budgets = state
        side: ReadingSide = self.views[side_id].side
        for peer, number in enumerate(prefills):
            epoch = self.views[number].epoch
            if side.peers[peer] != epoch:
                yield self._apply(state, rank, ("learn", peer, epoch))
            elif self._left(budgets, "suspect"):
                yield self._apply(state, rank, ("lost", epoch), "suspect")
        for epoch, generation, dead in side.revokes:
            if self.world.own_fence:
                yield self._own_fence(state, rank, epoch, generation)
            else:
                yield self._apply(state, rank, ("unfenced", epoch, generation, dead))
        for report in side.reports:
            yield self._apply(state, rank, ("report", *report))
        for leg in side.checks:
            yield self._look(state, rank, side, leg)
        for leg in side.drains:
            yield self._apply(state, rank, ("drained", leg, False), fair=not self.world.drain)
            if self.world.drain:
                yield from self._drain(state, rank, leg)
        if self._left(budgets, "pings"):
            step = self.local(side_id, ("ping",))
            if self.views[step.side].side.said != side.said:
                yield self._apply(state, rank, ("ping",), "pings")

    def _look(self, state: State, rank: int, side: ReadingSide, leg: Leg) -> Move:
        """The check: what the source says at this moment of the grant that was read."""
        there = self.views[state[1][leg.p_rank]]
        return self._apply(state, rank, ("checked", leg, there.epoch, there.side.lender.in_force.get(leg)))

    def _own_fence(self, state: State, rank: int, epoch: int, generation: int) -> Move:
        """Decode attaches anew, so a source that lives makes its next grants under a newer generation."""
        move = self._apply(state, rank, ("effect", epoch, generation, False, False, ()))
        for at, number in enumerate(state[1], len(state[0])):
            if self.views[number].epoch == epoch and move.state is not None:
                left = ("left", self.views[state[0][0]].epoch, generation)
                move = self._apply(move.state, at, left)._replace(event=move.event)
        return self._refusing(move, lambda read: read.leg.p_epoch == epoch and read.generation <= generation)

    def _refusing(self, move: Move, hit: Any) -> Move:
        """What is under way and hit ends FAILED_CLEAN, or, where nobody waits for it, is gone."""
        if move.state is None:
            return move
        posts = []
        for post in move.state[3]:
            if not hit(self.flights[post >> 2]):
                posts.append(post)
            elif post & 3 != LOOSE:
                posts.append((post & ~3) | REFUSED)
        return move._replace(state=(*move.state[:3], tuple(sorted(posts)), *move.state[4:]))

    # ------------------------------------------------------------ prefill

    def _prefill_moves(self, state: State, at: int, side_id: int, budgets: tuple[int, ...]) -> Iterator[Move]:
        side: SourceSide = self.views[side_id].side
        alive = self.views[state[0][0]].epoch
        if alive not in side.lender.lenders and alive not in side.lender.gone:
            yield self._apply(state, at, ("learn", alive))
        elif self._left(budgets, "suspect") and alive not in side.lender.gone:
            yield self._apply(state, at, ("lost", alive), "suspect")
        if self._left(budgets, "fault"):
            for tid, transfer in side.lender.transfers.items():
                if transfer.state in (d.State.RESERVED, d.State.OFFERED):
                    yield self._apply(state, at, ("fault", tid), "fault")
        for epoch, generation, dead in side.revokes:
            gone = dead and epoch != alive and self.world.gone
            if self.world.fence or gone:
                yield self._fence(state, at, side, (epoch, generation, dead), gone and not self.world.fence)
            if not self.world.fence or self._left(budgets, "unfenced"):
                spend = "unfenced" if self.world.fence else None
                yield self._apply(state, at, ("unfenced", epoch, generation, dead), spend)
        for report in side.reports:
            yield self._apply(state, at, ("report", *report))

    def _fence(self, state: State, at: int, side: SourceSide, asked: tuple[int, int, bool], gone: bool) -> Move:
        """From now on nothing more is taken under these grants; what was taken already may still land."""
        epoch, generation, _ = asked
        move = self._apply(state, at, ("effect", *asked, gone), fair=True)
        return self._refusing(
            move,
            lambda read: (
                read.leg.p_epoch == side.epoch
                and read.leg.tid.epoch == epoch
                and read.generation <= generation
                and read.taken is None
            ),
        )

    # ------------------------------------------------------------ crashes

    def _crashes(self, state: State) -> Iterator[Move]:
        decodes, prefills, net, posts, placed, budgets = state
        reader = self.views[decodes[0]]
        if self._left(budgets, "crash_p"):
            for rank, side_id in enumerate(prefills):
                epoch = self.views[side_id].epoch
                fresh = self._intern(SourceSide(self.world, epoch + 1, rank, reader.epoch))
                new = (*prefills[:rank], fresh, *prefills[rank + 1 :])
                spent = self._spend(budgets, "crash_p")
                yield Move(("crash", "P", rank, epoch), (decodes, new, net, posts, placed, spent), None, False)
        if self._left(budgets, "crash_d"):
            peers = tuple(self.views[number].epoch for number in prefills)
            fresh_d = self._intern(ReadingSide(self.world, reader.epoch + 1, 0, peers, reader.side.reserved))
            spent = self._spend(budgets, "crash_d")
            after: State = ((fresh_d,), prefills, net, self._bound(posts), frozenset(), spent)
            yield Move(("crash", "D", 0, reader.epoch), after, None, False)

    def _bound(self, posts: tuple[int, ...]) -> tuple[int, ...]:
        """Answers land only in the epoch that posted them: in the new memory nothing does."""
        return ()

    # ------------------------------------------------------------ liveness

    def heartbeat(self, state: State, rank: int) -> Iterator[Move]:
        """PINGs are repeated for ever, so one of them arrives: worth a move when it closes something."""
        for peer in range(self.world.prefills):
            before = self.views[state[1][peer]].side.lender
            move = self._pinged(state, peer)
            if move.state is None:
                yield move
                continue
            after = self.views[move.state[1][peer]].side.lender
            if (len(before.transfers), len(before.tombstones)) != (len(after.transfers), len(after.tombstones)):
                yield move

    def _pinged(self, state: State, peer: int) -> Move:
        ping = self.local(state[0][0], ("ping",))
        at = 1 + peer
        number = (ping.sends & self.inbox[at]).bit_length() - 1
        return self._merge(((ping.side,), *state[1:]), at, number, self.local(state[1][peer], number))

    def renewed(self, state: State, at: int, tid: TransferId) -> bool:
        """The reader that lives now keeps this lease alive by its PINGs."""
        move = self._pinged(state, at - 1)
        return move.state is not None and tid in self.views[move.state[1][at - 1]].side.renewed

    def settled(self, state: State) -> bool:
        """Every transfer has ended or is running; what is held may be held for ever: a taint without drain and fence,
        a dead reader without GONE and fence."""
        decodes, prefills = state[:2]
        world, reader = self.world, self.views[decodes[0]]
        tainted = set()
        for tid, transfer in reader.side.lender.transfers.items():
            spoilt = any(reading.tainted for reading in transfer.published.values())
            if transfer.state is d.State.HOLDING and spoilt and not (world.own_fence or world.drain):
                tainted.add(tid)
            elif transfer.state is not d.State.COMMITTED:
                return False
        for number in prefills:
            lender = self.views[number].side.lender
            for tid, transfer in lender.transfers.items():
                dead = tid.epoch != reader.epoch and not (world.fence or world.gone)
                kept = dead or (tid in tainted and not world.fence)
                if transfer.state is not d.State.HOLDING or not kept:
                    return False
            if lender.ledger._holdings.keys() - lender.transfers.keys():
                return False
        return True


def model_of(world: World, *, strict: bool = True, paced: bool = False) -> Model:
    kind = PullModel if world.pull else RanksModel if world.led else Model
    return kind(world, strict=strict, paced=paced)
