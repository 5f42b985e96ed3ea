"""The two ends of the modelled cluster. Each drives the real core machines and does what a role's loop does.

A side is one process: it hears a local event and returns what leaves it. Everything about a side that can matter
later is in its attributes, so that a frozen side is a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quiesce.core import borrower as b
from quiesce.core import lender as d
from quiesce.core.ledger import Ledger
from quiesce.core.machine import (
    Action,
    Arm,
    Committed,
    Fired,
    Heard,
    Lost,
    Opened,
    Post,
    Revoke,
    Send,
    Stopped,
    Timer,
    TryDrain,
    Verify,
)
from quiesce.core.messages import FirstToken, HandOff, Leg, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Proof
from quiesce.lab.worlds import World

Event = tuple[Any, ...]
PAIRING, ANOTHER = b"this prompt", b"another prompt"


class Out(NamedTuple):
    """What leaves a process in one step."""

    sends: tuple[HandOff | Ping, ...] = ()
    posts: tuple[Post, ...] = ()
    commits: tuple[tuple[TransferId, FirstToken], ...] = ()


def token_of(tid: TransferId, rank: int) -> FirstToken:
    """The first token that rank `rank` would answer for `tid`; only the designated rank's is the right one."""
    return FirstToken(tid.epoch * 1000 + tid.seq * 10 + rank)


class DecodeSide:
    """One decode rank: lender, ledger, and what its transport was asked."""

    def __init__(self, world: World, epoch: int, rank: int, peers: tuple[int, ...], reserved: int) -> None:
        self.epoch = epoch
        self.rank = rank
        self.ledger = Ledger(PagePool(world.pool), PagePool(world.rows, "rows"))
        self.lender = d.Lender(epoch, self.ledger, rank=rank)
        self.peers = list(peers)  # prefill rank -> the epoch its handshake gave
        self.generations = dict.fromkeys(peers, 1)
        self.reserved = reserved  # requests of the world begun so far, earlier epochs included
        self.revokes: set[tuple[int, int, bool]] = set()
        self.reports: set[tuple[int, int, bool, tuple[int, ...]]] = set()  # fences that took effect, not reported yet
        self.barred: set[tuple[int, int, int]] = set()  # epoch, generation, page fenced by itself
        self.verifying: set[TransferId] = set()
        self.timers: set[tuple[Timer, TransferId | Leg]] = set()
        self.given_up: set[TransferId] = set()
        self.said: tuple[int, tuple[int, ...]] | None = None  # the closed set of the last PING

    def step(self, world: World, event: Event) -> Out:  # noqa: PLR0912 - one case an event
        out: list[Action] = []
        sends: list[HandOff | Ping] = []
        match event:
            case ("hear", message, speaker):
                out = self.lender.on(Heard(message, speaker))
            case ("reserve",):
                pages = world.requests[self.reserved]
                ranks = dict(enumerate(self.peers))
                tid = self.lender.reserve(ranks, room=self.reserved, pairing=PAIRING, tokens=pages, pages=pages)
                assert tid is not None
                self.reserved += 1
            case ("publish", tid, rank):
                epoch = self.lender.transfers[tid].ranks[rank]
                out = self.lender.on(d.Publish(tid, rank, 0, self.generations[epoch], 1000))
            case ("end", tid):
                out = self.lender.on(d.End(tid, "aborted"))
            case ("fire", timer, tid):
                self.timers.discard((timer, tid))
                out = self.lender.on(Fired(timer, tid, 0))
            case ("lost", epoch):
                out = self.lender.on(d.PeerLost(epoch, "lost"))
            case ("learn", rank, epoch):
                old, self.peers[rank] = self.peers[rank], epoch
                self.generations[epoch] = 1
                out = self.lender.on(d.PeerLost(old, "restarted"))
            case ("effect", epoch, generation, dead, gone, pages):
                # The transport has revoked it; the lender hears of it later, by "report".
                self.revokes.discard((epoch, generation, dead))
                self.reports.add((epoch, generation, gone, pages))
                self.barred |= {(epoch, generation, page) for page in pages}
                if not gone and not pages:
                    self.generations[epoch] = max(self.generations[epoch], generation + 1)
            case ("report", epoch, generation, gone, pages):
                self.reports.discard((epoch, generation, gone, pages))
                proof = (
                    Proof.gone(epoch, generation)
                    if gone
                    else Proof.fenced(epoch, generation, frozenset(pages) or None)
                )
                out = self.lender.on(d.Revoked(proof))
            case ("unfenced", epoch, generation, dead):
                self.revokes.discard((epoch, generation, dead))
                out = self.lender.on(d.NotRevoked(epoch, generation))
            case ("verified", tid, matches):
                self.verifying.discard(tid)
                suspects = frozenset() if matches else frozenset(self.peers)
                out = self.lender.on(d.Verified(tid, matches, suspects))
            case ("ping",):
                counter, high, listed = self.lender.closed_set()
                self.said = (high, tuple(listed))
                sends.append(Ping(self.epoch, self.rank, 0, counter, high, listed))
            case _:
                raise ValueError(event)
        return self._do(out, sends)

    def _do(self, actions: list[Action], sends: list[HandOff | Ping]) -> Out:
        commits = []
        for action in actions:
            match action:
                case Send(message=message):
                    sends.append(message)
                case Arm(timer=timer, about=about):
                    self.timers.add((timer, about))
                case Revoke(epoch=epoch, generation=generation, dead=dead):
                    self.revokes.add((epoch, generation, dead))
                case Verify(tid=tid):
                    self.verifying.add(tid)
                case Lost(tid=tid):
                    self.given_up.add(tid)
                case Committed(tid=tid, result=result):
                    commits.append((tid, result))
        live = self.lender.transfers
        self.timers = {key for key in self.timers if key[1] in live}
        self.verifying &= live.keys()
        self.given_up &= live.keys()
        return Out(tuple(sends), (), tuple(commits))

    # ------------------------------------------------------------ what this process may do next by itself

    def may(self, world: World, exact: bool) -> list[Event]:
        events: list[Event] = []
        if self.reserved < len(world.requests) and self.ledger.pool.free >= world.requests[self.reserved]:
            events.append(("reserve",))
        for tid, transfer in self.lender.transfers.items():
            todo = [rank for rank in transfer.ranks if rank not in transfer.published]
            if transfer.state is d.State.RESERVED and todo:
                events.append(("publish", tid, todo[0]))
            if transfer.state in ENDABLE:
                events.append(("end", tid))
            for timer in Timer:
                # Without exact pacing a timer may fire whenever it has a row: more behaviour, less state.
                if (transfer.state, timer) in d.TABLE and (not exact or (timer, tid) in self.timers):
                    events.append(("fire", timer, tid))
        return events


ENDABLE = (d.State.RESERVED, d.State.OFFERED, d.State.LANDED, d.State.COMMITTED)


class PrefillSide:
    """One prefill rank: borrower, its source pages, and a stand-in for the engine that fills them."""

    def __init__(self, world: World, epoch: int, rank: int, lender: int) -> None:
        self.epoch = epoch
        self.rank = rank
        self.sources = Ledger(PagePool(world.sources), PagePool(world.rows, "rows"))
        self.borrower = b.Borrower(epoch, self.sources, rank=rank, window=world.window, max_records=world.records)
        self.borrower.on(b.LenderUp(lender))
        self.opened: dict[TransferId, set[Leg]] = {}
        self.chunks: dict[TransferId, int] = {}  # begun: chunks computed so far
        self.others: set[TransferId] = set()  # what is computed for it is another prompt
        self.content: dict[int, TransferId] = {}  # source page -> whose KV it holds
        self.numbers: dict[tuple[Leg, int], int] = {}  # posts without an outcome -> their number
        self.drains: set[Leg] = set()
        self.timers: set[tuple[Timer, TransferId | Leg]] = set()

    def step(self, world: World, event: Event) -> Out:
        out: list[Action] = []
        match event:
            case ("hear", message, speaker):
                out = self.borrower.on(Heard(message, speaker))
            case ("start", tid):
                self.sources.own(tid, self._pages(tid))
                self.chunks[tid] = 0
            case ("compute", tid, short):
                out = self._compute(world, tid, short)
            case ("pair", leg, pairing):
                out = self._pair(leg, pairing)
            case ("fault", leg):
                out = self.borrower.on(b.Fault(leg, "fault"))
            case ("ended", leg, first, outcome):
                out = self.borrower.on(b.PostEnded(leg, self.numbers.pop((leg, first), 0), outcome))
            case ("drained", leg, proven):
                self.drains.discard(leg)
                out = self.borrower.on(b.DrainSaid(leg, proven))
            case ("fire", timer, leg):
                self.timers.discard((timer, leg))
                out = self.borrower.on(Fired(timer, leg, 0))
            case ("learn", epoch):
                old = [lender for lender in self.borrower.lenders if lender != epoch]
                out = self.borrower.on(b.LenderUp(epoch))
                for lender in old:
                    out += self.borrower.on(b.LenderGone(lender))
            case _:
                raise ValueError(event)
        return self._do(out, world)

    def _pair(self, leg: Leg, pairing: bytes) -> list[Action]:
        if pairing == ANOTHER:
            self.others.add(leg.tid)
        return self.borrower.on(b.Paired(leg, pairing))

    def _paired(self, legs: set[Leg]) -> bool:
        records = [self.borrower.record(leg) for leg in legs]
        return all(record is not None and record.paired for record in records)

    def _pages(self, tid: TransferId) -> int:
        record = next(iter(self.borrower.records[tid].values()))
        assert record.offer is not None
        return len(record.offer.grant.pages)

    def _compute(self, world: World, tid: TransferId, short: bool) -> list[Action]:
        first = self.chunks[tid] * world.chunk
        pages = self.sources.pages(tid)
        source = pages[first : first + world.chunk]
        self.chunks[tid] += 1
        for page in source:
            self.content[page] = TransferId(0, tid.seq) if tid in self.others else tid
        out: list[Action] = []
        last = short or first + world.chunk >= len(pages)
        for leg in sorted(self.opened[tid]):
            out += self.borrower.on(b.ChunkReady(leg, b.Chunk(source, first)))
            if last:
                tokens = first + len(source)
                digest = b"digest" if world.digest else None
                out += self.borrower.on(b.Complete(leg, tokens, token_of(tid, self.rank), digest))
        if last:
            self.chunks[tid] = len(pages)
        return out

    def _do(self, actions: list[Action], world: World) -> Out:
        sends, posts = [], []
        for action in actions:
            match action:
                case Send(message=message):
                    sends.append(message)
                case Arm(timer=timer, about=about):
                    self.timers.add((timer, about))
                case Opened(leg=leg):
                    self.opened.setdefault(leg.tid, set()).add(leg)
                    if not world.mispaired:
                        actions += self._pair(leg, PAIRING)
                case Post():
                    posts.append(action)
                    self.numbers[action.leg, action.grant.pages.index(action.destination[0])] = action.number
                case TryDrain(leg=leg):
                    self.drains.add(leg)
                case Stopped(leg=leg):
                    legs = self.opened.get(leg.tid, set())
                    legs.discard(leg)
                    if not legs:
                        self.opened.pop(leg.tid, None)
                        self.chunks.pop(leg.tid, None)
        known = {record.leg for record in self.borrower.all_records()}
        self.timers = {key for key in self.timers if key[1] in known}
        self.drains &= known
        self.others &= self.borrower.records.keys()
        held = {page for holding in self.sources._holdings.values() for page in holding.pages}
        self.content = {page: tid for page, tid in self.content.items() if page in held}
        self._renumber()
        return Out(tuple(sends), tuple(posts))

    def _renumber(self) -> None:
        """What matters of a post's number is which post it is: equal states get equal numbers."""
        new = {number: i + 1 for i, (_, number) in enumerate(sorted(self.numbers.items()))}
        self.numbers = {post: new[number] for post, number in self.numbers.items()}
        for record in self.borrower.all_records():
            record.posts = {new.get(number, -number) for number in record.posts}
        self.borrower._posts = len(new)

    def may(self, world: World, exact: bool) -> list[Event]:
        events: list[Event] = []
        for tid, legs in self.opened.items():
            if not self._paired(legs):
                events += [("pair", leg, PAIRING) for leg in sorted(legs)]
            elif tid not in self.chunks:
                if len(legs) == world.decodes and self.sources.pool.free >= self._pages(tid):
                    events.append(("start", tid))
            elif self.chunks[tid] * world.chunk < self._pages(tid):
                events.append(("compute", tid, False))
        for record in self.borrower.all_records():
            armed = (Timer.REPEAT, record.leg) in self.timers
            if (record.state, Timer.REPEAT) in b.TABLE and (armed or not exact):
                events.append(("fire", Timer.REPEAT, record.leg))
        return events
