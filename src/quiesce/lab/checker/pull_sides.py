"""The two ends of a modelled pull: the real machines of `core/pull_reader.py` and `core/pull_lender.py`."""

from __future__ import annotations

from quiesce.core import pull_lender as p
from quiesce.core import pull_reader as r
from quiesce.core.borrowing import DrainSaid, PostEnded
from quiesce.core.ledger import Ledger
from quiesce.core.lending import End, NotRevoked, PeerLost, Revoked, State
from quiesce.core.machine import Action, Arm, CheckGrant, Fired, Heard, Post, Revoke, Send, Timer, TryDrain
from quiesce.core.messages import HandOff, Leg, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Proof
from quiesce.core.pulling import COMPUTING, Ask, Checked, Computed, ReaderUp
from quiesce.lab.checker.sides import ENDABLE, PAIRING, DecodeSide, Event, Out, PrefillSide, token_of
from quiesce.lab.worlds import World


class ReadingSide(DecodeSide):
    """The decode rank: reader, ledger, its posts and what its transport was asked."""

    lender: r.PullReader  # type: ignore[assignment]  # it lends its destination pages to its own reads

    def __init__(self, world: World, epoch: int, rank: int, peers: tuple[int, ...], reserved: int) -> None:
        super().__init__(world, epoch, rank, peers, reserved)
        self.lender = r.PullReader(epoch, self.ledger, rank=rank, window=world.window, batch=world.chunk)
        self.numbers: dict[tuple[Leg, int], int] = {}  # reads without an outcome -> their number
        self.checks: set[Leg] = set()
        self.drains: set[Leg] = set()

    def step(self, world: World, event: Event) -> Out:
        match event:
            case ("reserve",):
                pages = world.requests[self.reserved]
                ranks = dict(enumerate(self.peers))
                tid = self.lender.reserve(ranks, room=self.reserved, pairing=PAIRING, tokens=pages, pages=pages)
                assert tid is not None
                self.reserved += 1
                return self._do(self.lender.on(Ask(tid, 1000)), [])
            case ("ended", leg, first, outcome):
                number = self.numbers.pop((leg, first), 0)
                return self._do(self.lender.on(PostEnded(leg, number, outcome)), [])
            case ("drained", leg, proven):
                self.drains.discard(leg)
                return self._do(self.lender.on(DrainSaid(leg, proven)), [])
            case ("checked", leg, epoch, generation):
                self.checks.discard(leg)
                return self._do(self.lender.on(Checked(leg, epoch, generation)), [])
            case ("ping",):
                counter, high, listed = self.lender.closed_set()
                reading = self.lender.reading()
                self.said = (high, (*listed, 0, *reading))
                return self._do([], [Ping(self.epoch, self.rank, 0, counter, high, listed, reading)])
        return super().step(world, event)

    def _do(self, actions: list[Action], sends: list[HandOff | Ping]) -> Out:
        out = super()._do(actions, sends)
        posts = tuple(action for action in actions if isinstance(action, Post))
        for post in posts:
            first = post.grant.pages.index(post.source[0])
            self.numbers[post.leg, first] = post.number
        self.checks |= {action.leg for action in actions if isinstance(action, CheckGrant)}
        self.drains |= {action.leg for action in actions if isinstance(action, TryDrain)}
        live = self.lender.transfers
        self.checks = {leg for leg in self.checks if leg.tid in live and live[leg.tid].state is not State.HOLDING}
        self.drains = {leg for leg in self.drains if leg.tid in live}
        self.numbers = {key: number for key, number in self.numbers.items() if key[0].tid in live}
        self._renumber()
        return out._replace(posts=posts)

    def _renumber(self) -> None:
        """What matters of a read's number is which read it is: equal states get equal numbers."""
        new = {number: i + 1 for i, (_, number) in enumerate(sorted(self.numbers.items()))}
        self.numbers = {read: new[number] for read, number in self.numbers.items()}
        for transfer in self.lender.transfers.values():
            for reading in self.lender._readings(transfer).values():
                reading.posts = {new.get(number, -number) for number in reading.posts}
        self.lender._posts = len(new)

    def may(self, world: World, exact: bool) -> list[Event]:
        events: list[Event] = []
        if self.reserved < len(world.requests) and self.ledger.pool.free >= world.requests[self.reserved]:
            events.append(("reserve",))
        for tid, transfer in self.lender.transfers.items():
            if transfer.state in ENDABLE:
                events.append(("end", tid))
            for timer in Timer:
                if (transfer.state, timer) in r.TABLE and (not exact or (timer, tid) in self.timers):
                    events.append(("fire", timer, tid))
        return events


class SourceSide(PrefillSide):
    """The prefill rank: lender of its source pages, and a stand-in for the engine that fills them."""

    def __init__(self, world: World, epoch: int, rank: int, reader: int) -> None:
        self.epoch = epoch
        self.rank = rank
        self.sources = Ledger(PagePool(world.sources), PagePool(world.rows, "rows"))
        self.lender = p.PullLender(epoch, self.sources, rank=rank, max_records=world.records)
        self.lender.on(ReaderUp(reader))
        self.content: dict[int, TransferId] = {}  # source page -> whose KV it holds, until something else is there
        self.revokes: set[tuple[int, int, bool]] = set()
        self.reports: set[tuple[int, int, bool]] = set()  # fences that took effect, not reported yet
        self.fenced: dict[int, int] = {}  # reader's epoch -> newest generation that it can read no more
        self.left: dict[int, int] = {}  # reader's epoch -> newest generation that it attached under and left
        self.renewed: set[TransferId] = set()  # by the PING heard last
        self.timers: set[tuple[Timer, TransferId | Leg]] = set()

    def step(self, world: World, event: Event) -> Out:  # noqa: PLR0912 - one case an event
        out: list[Action] = []
        self.renewed.clear()
        match event:
            case ("hear", message, speaker):
                out = self.lender.on(Heard(message, speaker))
                if isinstance(message, Ping):
                    armed = [action for action in out if isinstance(action, Arm) and action.timer is Timer.LEASE]
                    self.renewed = {arm.about for arm in armed if isinstance(arm.about, TransferId)}
            case ("lend", tid):
                out = self._lend(tid)
            case ("fault", tid):
                out = self.lender.on(End(tid, "fault"))
            case ("fire", timer, tid):
                self.timers.discard((timer, tid))
                out = self.lender.on(Fired(timer, tid, 0))
            case ("lost", epoch):
                out = self.lender.on(PeerLost(epoch, "lost"))
            case ("learn", epoch):
                old = [reader for reader in self.lender.lenders if reader != epoch]
                out = self.lender.on(ReaderUp(epoch))
                for reader in old:
                    out += self.lender.on(PeerLost(reader, "restarted"))
            case ("effect", epoch, generation, dead, gone):
                # The transport has revoked it; the lender hears of it later, by "report".
                self.revokes.discard((epoch, generation, dead))
                self.reports.add((epoch, generation, gone))
                if not gone:
                    self.fenced[epoch] = max(self.fenced.get(epoch, 0), generation)
            case ("left", epoch, generation):
                self.left[epoch] = max(self.left.get(epoch, 0), generation)
            case ("report", epoch, generation, gone):
                self.reports.discard((epoch, generation, gone))
                proof = Proof.gone(epoch, generation) if gone else Proof.fenced(epoch, generation)
                out = self.lender.on(Revoked(proof))
            case ("unfenced", epoch, generation, dead):
                self.revokes.discard((epoch, generation, dead))
                out = self.lender.on(NotRevoked(epoch, generation))
            case _:
                raise ValueError(event)
        return self._do(out, world)

    def over(self, leg: Leg) -> bool:
        """It has ended here and is never opened again."""
        lender = self.lender
        ended = leg in lender.tombstones or lender._is_closed(leg) or leg.tid.epoch in lender.gone
        return ended and leg.tid not in lender.transfers

    def _lend(self, tid: TransferId) -> list[Action]:
        pages = self.sources.own(tid, self.lender.transfers[tid].tokens)
        assert pages is not None
        self.content |= dict.fromkeys(pages, tid)
        generation = max(self.fenced.get(tid.epoch, 0), self.left.get(tid.epoch, 0)) + 1
        return self.lender.on(Computed(tid, PAIRING, len(pages), 0, generation, 1000, token_of(tid, self.rank)))

    def _do(self, actions: list[Action], world: World) -> Out:
        sends = []
        for action in actions:
            match action:
                case Send(message=message):
                    sends.append(message)
                case Arm(timer=timer, about=about):
                    self.timers.add((timer, about))
                case Revoke(epoch=epoch, generation=generation, dead=dead):
                    self.revokes.add((epoch, generation, dead))
        self.timers = {key for key in self.timers if key[1] in self.lender.transfers}
        return Out(tuple(sends))

    def may(self, world: World, exact: bool) -> list[Event]:
        events: list[Event] = []
        for tid, transfer in self.lender.transfers.items():
            if transfer.state is COMPUTING and self.sources.pool.free >= transfer.tokens:
                events.append(("lend", tid))
            for timer in Timer:
                if (transfer.state, timer) in p.TABLE and (not exact or (timer, tid) in self.timers):
                    events.append(("fire", timer, tid))
        return events
