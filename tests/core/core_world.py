"""A whole hand-off in one process: the real lender, real borrowers, and everything that may happen between them.

Every source of disorder is a method that takes a number, so that a seed or hypothesis can choose. A message that was
sent stays on the wire: it may be delivered never, late, twice or out of order. A posted write lands when it likes,
also after its outcome was told UNKNOWN and also after its process has died. What must never happen is checked where
it would happen: in `land`, and when a transfer commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from between import Between

from quiesce.core.borrower import (
    Borrower,
    Chunk,
    ChunkReady,
    Complete,
    DrainSaid,
    Fault,
    LenderGone,
    LenderUp,
    Outcome,
    Paired,
    PostEnded,
)
from quiesce.core.borrower import State as Borrowing
from quiesce.core.ledger import Ledger
from quiesce.core.lender import DESIGNATED_RANK, End, Lender, NotRevoked, PeerLost, Publish, Revoked, State, Verified
from quiesce.core.machine import (
    Closed,
    Committed,
    Heard,
    Lost,
    Opened,
    Post,
    Revoke,
    Stopped,
    TryDrain,
    Verify,
)
from quiesce.core.messages import FirstToken, Leg, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof

PAGES = 6
TRANSFER = 2  # pages of one transfer
TOKENS = 24


@dataclass
class Flying:
    """A post in the network. `told`: the borrower has its outcome; then the bytes may still land if UNKNOWN."""

    post: Post
    epoch: int
    told: bool = False
    landed: bool = False
    refused: bool = False  # by a fence: can never land, ends FAILED_CLEAN

    @property
    def over(self) -> bool:
        return self.landed or self.refused


@dataclass
class Prefill:
    """One borrower process."""

    epoch: int
    rank: int
    sources: Ledger
    borrower: Borrower
    alive: bool = True
    computing: dict[Leg, int] = field(default_factory=dict)  # leg -> pages handed in
    drains: list[Leg] = field(default_factory=list)


@dataclass
class Decode:
    """One lender process."""

    epoch: int
    ledger: Ledger
    lender: Lender
    alive: bool = True
    verifying: list[TransferId] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)


class World(Between):
    def __init__(self, ranks: int = 1, *, fences: bool = True, drains: bool = True) -> None:
        super().__init__(ranks)
        self.fences, self.drains = fences, drains
        self.flying: list[Flying] = []
        self.generation: dict[tuple[int, int], int] = {}  # (lender epoch, borrower epoch) -> current
        self.written: dict[tuple[int, int, int], Leg] = {}  # (lender epoch, page, rank) -> who wrote it last
        self.start_decode()
        for rank in range(ranks):
            self.start_prefill(rank)

    # ------------------------------------------------------------ processes

    def start_decode(self) -> None:
        epoch = self._epoch()
        ledger = Ledger(PagePool(PAGES), PagePool(3, "rows"))
        self.decodes.append(Decode(epoch, ledger, Lender(epoch, ledger)))
        for prefill in self.current.values():
            self.borrowed(prefill, LenderUp(epoch))

    def start_prefill(self, rank: int) -> None:
        epoch = self._epoch()
        sources = Ledger(PagePool(PAGES), PagePool(3, "rows"))
        prefill = Prefill(epoch, rank, sources, Borrower(epoch, sources, rank=rank, window=2, max_records=6))
        self.prefills[epoch] = self.current[rank] = prefill
        self.borrowed(prefill, LenderUp(self.decode.epoch))

    def notice(self, pick: int) -> None:
        dead = self.dead_prefills()
        if dead:
            self.lent(PeerLost(dead[pick % len(dead)], "prefill died"))

    def crash_decode(self, pick: int) -> None:
        """New memory: what flies to the old process lands nowhere."""
        old = self.decode
        old.alive = False
        self.start_decode()
        for prefill in self.current.values():
            if pick % 2:
                self.borrowed(prefill, LenderGone(old.epoch))

    def notice_decode(self, pick: int) -> None:
        dead = self.dead_decodes()
        if dead:
            prefill = self.current[pick % self.ranks]
            self.borrowed(prefill, LenderGone(dead[pick % len(dead)]))

    # ------------------------------------------------------------ requests

    def request(self, pick: int) -> None:
        decode = self.decode
        ranks = {rank: self.current[rank].epoch for rank in range(self.ranks)}
        decode.lender.reserve(ranks, room=pick, pairing=b"p", tokens=TOKENS, pages=TRANSFER)

    def publish(self, pick: int) -> None:
        waiting = [
            (transfer.tid, rank, epoch)
            for transfer in self.decode.lender.transfers.values()
            if transfer.state is State.RESERVED
            for rank, epoch in transfer.ranks.items()
            if rank not in transfer.published
        ]
        if waiting:
            tid, rank, epoch = waiting[pick % len(waiting)]
            generation = self.generation.setdefault((self.decode.epoch, epoch), 1)
            self.decode.granted.add(epoch)
            self.lent(Publish(tid, rank, 0, generation, 1000))

    def end(self, pick: int) -> None:
        tids = list(self.decode.lender.transfers)
        if tids:
            self.lent(End(tids[pick % len(tids)], "ended"))

    def verify(self, pick: int, matches: bool | None = None) -> None:
        if self.decode.verifying:
            tid = self.decode.verifying.pop(pick % len(self.decode.verifying))
            good = pick % 8 != 0 if matches is None else matches
            self.lent(Verified(tid, good, frozenset() if good else frozenset(self.decode.granted)))

    def ping(self, pick: int) -> None:
        counter, high, seqs = self.decode.lender.closed_set()
        ping = Ping(self.decode.epoch, 0, 0, counter, high, seqs)
        for prefill in self.current.values():
            self._put(prefill.epoch, Heard(ping, self.decode.epoch))

    # ------------------------------------------------------------ computing and posting

    def compute(self, pick: int) -> None:
        """The next page of some prompt, or its end, or a fault."""
        legs = [(prefill, leg) for prefill in self.current.values() for leg in prefill.computing]
        if not legs:
            return
        prefill, leg = legs[pick % len(legs)]
        done = prefill.computing[leg]
        if pick % 31 == 30:
            self.borrowed(prefill, Fault(leg, "compute failed"))
        elif done == TRANSFER:
            del prefill.computing[leg]
            result = FirstToken(1) if prefill.rank == DESIGNATED_RANK else None
            self.borrowed(prefill, Complete(leg, TOKENS, result, b"d" if pick % 2 else None))
        else:
            prefill.computing[leg] = done + 1
            page = prefill.sources.pages(leg.tid)[done]
            self.borrowed(prefill, ChunkReady(leg, Chunk((page,), done)))

    def land(self, pick: int) -> None:
        """Bytes arrive. This is where a page in the wrong hands would be seen."""
        flying = [flight for flight in self.flying if not flight.over]
        if flying:
            self._land(flying[pick % len(flying)])

    def _land(self, flight: Flying) -> None:
        flight.landed = True
        leg = flight.post.leg
        decode = next(decode for decode in self.decodes if decode.epoch == leg.tid.epoch)
        if not decode.alive:
            return  # placement is bound to the lender's epoch at the target
        transfer = decode.lender.transfers.get(leg.tid)
        for page in flight.post.destination:
            owns = decode.ledger.knows(leg.tid) and page in decode.ledger.pages(leg.tid)
            assert owns, f"{leg} wrote page {page}, which is not its any more"
            assert transfer is not None and transfer.state not in (State.COMMITTED, State.LANDED), (
                f"{leg} wrote page {page} of a transfer that had been read: {transfer}"
            )
            self.written[decode.epoch, page, leg.p_rank] = leg
        prefill = self.prefills[flight.epoch]
        for page in flight.post.source if prefill.alive else ():
            held = prefill.sources.knows(leg.tid) and page in prefill.sources.pages(leg.tid)
            assert held, f"{leg} sent source page {page}, which is not its any more"

    def outcome(self, pick: int, unknown: bool | None = None) -> None:
        """Some post ends: PLACED once landed, FAILED_CLEAN once refused or never to land, else UNKNOWN."""
        open_ones = [flight for flight in self.flying if not flight.told and self.prefills[flight.epoch].alive]
        if not open_ones:
            return
        flight = open_ones[pick % len(open_ones)]
        flight.told = True
        if unknown is None:
            unknown = pick % 11 == 0
        if unknown:
            outcome = Outcome.UNKNOWN
        elif flight.refused:
            outcome = Outcome.FAILED_CLEAN
        elif flight.landed or pick % 13:
            if not flight.landed:
                self._land(flight)
            outcome = Outcome.PLACED
        else:
            flight.refused = True
            outcome = Outcome.FAILED_CLEAN
        post = flight.post
        self.borrowed(self.prefills[flight.epoch], PostEnded(post.leg, post.number, outcome))

    def drain(self, pick: int) -> None:
        asked = [prefill for prefill in self.current.values() if prefill.drains]
        if asked:
            prefill = asked[pick % len(asked)]
            leg = prefill.drains.pop(0)
            lingering = any(
                f.epoch == prefill.epoch and f.post.leg.tid == leg.tid and not f.over for f in self.flying
            )
            self.borrowed(prefill, DrainSaid(leg, self.drains and not lingering))

    def fence(self, pick: int, refuse: bool | None = None) -> None:
        """The transport answers a `Revoke`: it revokes what flies and what will be posted, or says it cannot."""
        if not self.revokes:
            return
        epoch, revoke = self.revokes.pop(pick % len(self.revokes))
        decode = next(decode for decode in self.decodes if decode.epoch == epoch)
        if not decode.alive:
            return
        if refuse is None:
            refuse = pick % 4 == 0
        mine = [
            flight
            for flight in self.flying
            if flight.epoch == revoke.epoch
            and flight.post.leg.tid.epoch == epoch
            and flight.post.grant.generation <= revoke.generation
        ]
        prefill = self.prefills[revoke.epoch]
        if revoke.dead and not prefill.alive and all(flight.over for flight in mine) and not refuse:
            self.lent(Revoked(Proof.gone(revoke.epoch, revoke.generation)))
        elif self.fences and not refuse:
            key = (epoch, revoke.epoch)
            self.generation[key] = max(self.generation.get(key, 1), revoke.generation + 1)
            for flight in mine:
                flight.refused = flight.refused or not flight.landed
            self.lent(Revoked(Proof.fenced(revoke.epoch, revoke.generation)))
        else:
            self.lent(NotRevoked(revoke.epoch, revoke.generation))

    def mislead(self, pick: int) -> None:
        """A message for a dead borrower reaches its successor."""
        stray = [
            (self.current[self.prefills[to].rank], heard)
            for to, heard in self.wire
            if to in self.prefills and not self.prefills[to].alive
        ]
        if stray:
            self.borrowed(*stray[pick % len(stray)])

    # ------------------------------------------------------------ what the machines ask for

    def lent(self, event: object) -> None:
        decode = self.decode
        for action in decode.lender.on(event):  # type: ignore[arg-type]
            match action:
                case Revoke():
                    self.revokes.append((decode.epoch, action))
                case Verify(tid):
                    decode.verifying.append(tid)
                case Committed(tid):
                    self.committed += 1
                    self._check_whole(decode, tid)
                case Lost():
                    self.lost += 1
                case Closed(tid):
                    assert not decode.ledger.knows(tid), "said to be closed, but held"
                case _:
                    self._common(decode.epoch, action)

    def _check_whole(self, decode: Decode, tid: TransferId) -> None:
        assert not decode.ledger.leases(tid)
        for page in decode.ledger.pages(tid):
            for rank, epoch in decode.lender.transfers[tid].ranks.items():
                assert self.written.get((decode.epoch, page, rank)) == Leg(tid, 0, rank, epoch), (
                    "committed with a hole"
                )
        assert not [f for f in self.flying if f.post.leg.tid == tid and not f.over], "committed, and more may land"

    def borrowed(self, prefill: Prefill, event: object) -> None:
        for action in prefill.borrower.on(event):  # type: ignore[arg-type]
            match action:
                case Post(leg=leg, grant=grant):
                    flight = Flying(action, prefill.epoch)
                    flight.refused = grant.generation < self.generation[leg.tid.epoch, prefill.epoch]
                    self.flying.append(flight)
                case Opened(leg):
                    if prefill.sources.own(leg.tid, TRANSFER) is None:
                        self.borrowed(prefill, Fault(leg, "no room"))
                    else:
                        prefill.computing[leg] = 0
                        self.borrowed(prefill, Paired(leg, b"p"))
                case Stopped(leg):
                    prefill.computing.pop(leg, None)
                case TryDrain(leg):
                    prefill.drains.append(leg)
                case _:
                    self._common(prefill.epoch, action)

    decode_hears, prefill_hears = lent, borrowed

    # ------------------------------------------------------------ invariants and the end

    def consistent(self) -> None:
        self.check_books([self.decode.ledger, *(prefill.sources for prefill in self.current.values())])
        for prefill in self.current.values():
            assert prefill.borrower.known == sum(1 for _ in prefill.borrower.all_records())
            for record in prefill.borrower.all_records():
                pending = [f for f in self.flying if f.epoch == prefill.epoch and f.post.leg == record.leg]
                assert record.count == sum(1 for flight in pending if not flight.told)

        for flight in self.flying:
            leg, prefill = flight.post.leg, self.prefills[flight.epoch]
            if prefill.alive and not flight.over and self.decode.ledger.has(LeaseKey.write(leg)):
                assert prefill.borrower.record(leg) is not None, f"{leg} was forgotten while the lender holds for it"

    def quiesce(self) -> None:
        """Everything that can end ends: no loss, no new work, every clock ticks, every fence that exists is had."""
        dead = self.dead_prefills()
        for decode in self.decodes[:-1]:
            for prefill in self.current.values():
                self.borrowed(prefill, LenderGone(decode.epoch))
        for tid in list(self.decode.lender.transfers):
            self.lent(End(tid, "shutting down"))
        for _ in range(12):
            for flight in self.flying:
                if not flight.over:
                    self._land(flight)
            while any(not f.told and self.prefills[f.epoch].alive for f in self.flying):
                self.outcome(1, unknown=False)
            for epoch in dead:
                self.lent(PeerLost(epoch, "prefill died"))
            self._run_all(lambda: self.decode.verifying, lambda: self.verify(1, matches=True))
            self._run_all(lambda: self.revokes, lambda: self.fence(1, refuse=False))
            self._run_all(lambda: [p for p in self.current.values() if p.drains], lambda: self.drain(0))
            self.deliver_all()
            self.fire_all()
            self.ping(0)
            self.consistent()

    @staticmethod
    def _run_all(left: Callable[[], object], step: Callable[[], None]) -> None:
        for _ in range(1000):
            if not left():
                return
            step()
        raise AssertionError("does not end")

    def check_quiet(self) -> None:
        """All closed, or retained with a reason that protocol.md names."""
        lender = self.decode.lender
        for transfer in lender.transfers.values():
            if transfer.state is State.QUARANTINE:
                continue
            assert transfer.state is State.HOLDING
            for peer in transfer.published.values():
                if peer.proven:
                    continue
                leg = peer.offer.leg
                prefill = self.prefills[leg.p_epoch]
                record = prefill.borrower.record(leg)
                stuck = record is not None and record.state is Borrowing.TAINTED and not self.drains
                assert not self.fences and (not prefill.alive or stuck), f"{leg} is held without a reason: {record}"
        kept = set(lender.transfers)
        assert {tid for tid in kept if self.decode.ledger.knows(tid)} == kept
        assert self.decode.ledger.census().free == PAGES - TRANSFER * len(kept)
        for prefill in self.current.values():
            assert {record.leg.tid for record in prefill.borrower.all_records()} <= kept
            tainted = {record.leg.tid for record in prefill.borrower.all_records() if record.tainted}
            assert prefill.sources.census().free == PAGES - TRANSFER * len(tainted)


MOVES: list[tuple[str, int]] = [
    ("request", 4),
    ("publish", 8),
    ("deliver", 30),
    ("compute", 16),
    ("land", 6),
    ("outcome", 10),
    ("fire", 5),
    ("end", 1),
    ("verify", 4),
    ("ping", 2),
    ("drain", 3),
    ("fence", 3),
    ("mislead", 1),
    ("notice", 1),
    ("notice_decode", 1),
    ("crash_prefill", 1),
]
