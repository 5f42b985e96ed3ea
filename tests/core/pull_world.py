"""A pull in one process: the real reader, real lenders, and everything that may happen between them.

Every source of disorder is a method that takes a number, so that hypothesis can choose. A sent message may be
delivered never, late, twice or out of order. A read takes what is in the source page at one moment and lands at a
later one, also after its outcome was told UNKNOWN. What must never happen is checked where it would happen: in
`take`, in `land`, and when a transfer commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from between import Between

from quiesce.core.borrowing import DrainSaid, PostEnded
from quiesce.core.ledger import Ledger
from quiesce.core.lender import DESIGNATED_RANK
from quiesce.core.lending import End, NotRevoked, PeerLost, Revoked, State
from quiesce.core.machine import (
    Action,
    CheckGrant,
    Closed,
    Committed,
    Heard,
    Lost,
    Opened,
    Post,
    Revoke,
    TryDrain,
)
from quiesce.core.messages import FirstToken, Grant, Leg, Ping, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.posting import Outcome
from quiesce.core.proofs import LeaseKey, Proof
from quiesce.core.pull_lender import PullLender
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import COMPUTING, Ask, Checked, Computed, ReaderUp

PAGES, TRANSFER, TOKENS = 6, 2, 24


@dataclass
class Read:
    post: Post
    reader: int  # epoch
    right: bool | None = None  # once taken: was it the prompt that was asked for
    landed: bool = False
    refused: bool = False  # by a fence of either side, or failed clean: never lands
    told: bool = False

    @property
    def over(self) -> bool:
        return self.landed or self.refused


@dataclass
class Decode:
    epoch: int
    ledger: Ledger
    reader: PullReader
    alive: bool = True
    checks: list[CheckGrant] = field(default_factory=list)
    drains: list[Leg] = field(default_factory=list)


@dataclass
class Prefill:
    epoch: int
    rank: int
    ledger: Ledger
    lender: PullLender
    alive: bool = True
    content: dict[int, TransferId] = field(default_factory=dict)  # page -> whose KV was computed there last
    fenced: dict[int, int] = field(default_factory=dict)  # reader -> newest generation that it can read no more


class PullWorld(Between):
    def __init__(self, ranks: int = 1, *, fences: bool = True, own_fences: bool = True) -> None:
        super().__init__(ranks)
        self.fences, self.own_fences = fences, own_fences
        self.reads: list[Read] = []
        self.written: dict[
            tuple[int, int, int], tuple[TransferId, bool]
        ] = {}  # (reader, page, rank) -> of whom, right?
        self.barred: dict[tuple[int, int], int] = {}  # (reader, source) -> newest generation that lands no more
        self.start_decode()
        for rank in range(ranks):
            self.start_prefill(rank)

    # ------------------------------------------------------------ processes

    def start_decode(self) -> None:
        epoch, ledger = self._epoch(), Ledger(PagePool(PAGES), PagePool(3, "rows"))
        self.decodes.append(Decode(epoch, ledger, PullReader(epoch, ledger, window=1, batch=1)))
        for prefill in self.current.values():
            self.lent(prefill, ReaderUp(epoch))

    def start_prefill(self, rank: int) -> None:
        epoch, ledger = self._epoch(), Ledger(PagePool(PAGES), PagePool(3, "rows"))
        prefill = Prefill(epoch, rank, ledger, PullLender(epoch, ledger, rank=rank, max_records=6))
        self.prefills[epoch] = self.current[rank] = prefill
        self.lent(prefill, ReaderUp(self.decode.epoch))

    def crash_decode(self, pick: int) -> None:
        """Its reads land in nobody's memory."""
        old = self.decode
        old.alive = False
        self.start_decode()
        if pick % 2:
            for prefill in self.current.values():
                self.lent(prefill, PeerLost(old.epoch, "decode died"))

    def notice(self, pick: int) -> None:
        dead = self.dead_prefills()
        if dead:
            self.read(PeerLost(dead[pick % len(dead)], "prefill died"))

    def notice_decode(self, pick: int) -> None:
        dead = self.dead_decodes()
        if dead:
            self.lent(self.current[pick % self.ranks], PeerLost(dead[pick % len(dead)], "decode died"))

    # ------------------------------------------------------------ requests

    def request(self, pick: int) -> None:
        ranks = {rank: self.current[rank].epoch for rank in range(self.ranks)}
        tid = self.decode.reader.reserve(ranks, room=pick, pairing=b"p", tokens=TOKENS, pages=TRANSFER)
        if tid is not None:
            self.read(Ask(tid, 1000))

    def end(self, pick: int) -> None:
        tids = list(self.decode.reader.transfers)
        if tids:
            self.read(End(tids[pick % len(tids)], "ended"))

    def compute(self, pick: int) -> None:
        """A whole prompt, or its failure."""
        waiting = [
            (prefill, tid)
            for prefill in self.current.values()
            for tid, transfer in prefill.lender.transfers.items()
            if transfer.state is COMPUTING
        ]
        if not waiting:
            return
        prefill, tid = waiting[pick % len(waiting)]
        if pick % 31 == 30:
            self.lent(prefill, End(tid, "compute failed"))
            return
        pages = prefill.ledger.own(tid, TRANSFER)
        if pages is not None:
            prefill.content |= dict.fromkeys(pages, tid)
            result = FirstToken(1) if prefill.rank == DESIGNATED_RANK else None
            pairing = b"another" if pick % 29 == 28 else b"p"
            # Whoever was fenced, or fenced itself, attaches anew, and what is granted then is newer.
            over = prefill.fenced.get(tid.epoch, 0), self.barred.get((tid.epoch, prefill.epoch), 0)
            self.lent(prefill, Computed(tid, pairing, TOKENS, 0, max(over) + 1, 1000, result))

    def give_up(self, pick: int) -> None:
        """Prefill's own end of a request that it computes or lends."""
        prefill = self.current[pick % self.ranks]
        tids = list(prefill.lender.transfers)
        if tids:
            self.lent(prefill, End(tids[pick % len(tids)], "cancelled"))

    def ping(self, pick: int) -> None:
        reader = self.decode.reader
        counter, high, seqs = reader.closed_set()
        ping = Ping(self.decode.epoch, 0, 0, counter, high, seqs, reader.reading())
        for prefill in self.current.values():
            self._put(prefill.epoch, Heard(ping, self.decode.epoch))

    # ------------------------------------------------------------ reads

    def take(self, pick: int) -> None:
        waiting = [read for read in self.reads if read.right is None and not read.over]
        if waiting:
            self._take(waiting[pick % len(waiting)])

    def _take(self, read: Read) -> None:
        """This is where the bytes of another request would be seen to leave."""
        leg = read.post.leg
        source = self.prefills[leg.p_epoch]
        if not source.alive:
            read.right = False  # whoever runs there now answers with what is there now
            return
        for page in read.post.source:
            kept = source.ledger.knows(leg.tid) and page in source.ledger.pages(leg.tid)
            if self._reader_of(read).alive:
                assert kept and source.ledger.has(LeaseKey.source(leg)), f"{leg} read page {page}, not lent to it now"
        read.right = all(source.content.get(page) == leg.tid for page in read.post.source)

    def _reader_of(self, read: Read) -> Decode:
        return next(decode for decode in self.decodes if decode.epoch == read.reader)

    def land(self, pick: int) -> None:
        flying = [read for read in self.reads if read.right is not None and not read.over]
        if flying:
            self._land(flying[pick % len(flying)])

    def _land(self, read: Read) -> None:
        """And this is where they would be seen to arrive."""
        read.landed = True
        decode, leg = self._reader_of(read), read.post.leg
        if not decode.alive:
            return
        transfer = decode.reader.transfers.get(leg.tid)
        for page in read.post.destination:
            owns = decode.ledger.knows(leg.tid) and page in decode.ledger.pages(leg.tid)
            assert owns, f"a read of {leg} landed in page {page}, which is not its any more"
            assert transfer is not None and transfer.state is not State.COMMITTED, f"{leg} landed after its commit"
            self.written[decode.epoch, page, leg.p_rank] = (leg.tid, bool(read.right))

    def outcome(self, pick: int, unknown: bool | None = None) -> None:
        waiting = [read for read in self.reads if not read.told and self._reader_of(read).alive]
        if not waiting:
            return
        read = waiting[pick % len(waiting)]
        read.told = True
        if unknown is None:
            unknown = pick % 11 == 0
        if unknown:
            outcome = Outcome.UNKNOWN
        elif not read.refused and (read.landed or pick % 13):
            if read.right is None:
                self._take(read)
            if not read.landed:
                self._land(read)
            outcome = Outcome.PLACED
        else:
            read.refused = True
            outcome = Outcome.FAILED_CLEAN
        self.read(PostEnded(read.post.leg, read.post.number, outcome))

    def check(self, pick: int) -> None:
        """The check after landing looks at the source as it is now."""
        checks = self.decode.checks
        if checks:
            asked = checks.pop(pick % len(checks))
            there = self.current[asked.leg.p_rank]
            self.read(Checked(asked.leg, there.epoch, there.lender.in_force.get(asked.leg)))

    def drain(self, pick: int) -> None:
        if self.decode.drains:
            leg = self.decode.drains.pop(pick % len(self.decode.drains))
            self.read(DrainSaid(leg, not any(r.post.leg == leg and not r.over for r in self.reads) and pick % 2 == 0))

    def fence(self, pick: int, refuse: bool | None = None) -> None:
        if not self.revokes:
            return
        asker, revoke = self.revokes.pop(pick % len(self.revokes))
        refuse = pick % 4 == 0 if refuse is None else refuse
        prefill = self.prefills.get(asker)
        if prefill is None:
            self._own_fence(asker, revoke, refuse or not self.own_fences)
        elif prefill.alive:
            self._fence_reader(prefill, revoke, refuse)

    def _own_fence(self, asker: int, revoke: Revoke, refuse: bool) -> None:
        if asker != self.decode.epoch:
            return
        if refuse:
            self.read(NotRevoked(revoke.epoch, revoke.generation))
            return
        self.barred[asker, revoke.epoch] = max(self.barred.get((asker, revoke.epoch), 0), revoke.generation)
        for read in self.reads:
            leg, grant = read.post.leg, read.post.grant
            if (read.reader, leg.p_epoch) == (asker, revoke.epoch) and grant.generation <= revoke.generation:
                read.refused = read.refused or not read.landed
        self.read(Revoked(Proof.fenced(revoke.epoch, revoke.generation)))

    def _fence_reader(self, prefill: Prefill, revoke: Revoke, refuse: bool) -> None:
        reader = next(decode for decode in self.decodes if decode.epoch == revoke.epoch)
        if revoke.dead and not reader.alive and not refuse:
            self.lent(prefill, Revoked(Proof.gone(revoke.epoch, revoke.generation)))
        elif self.fences and not refuse:
            prefill.fenced[revoke.epoch] = max(prefill.fenced.get(revoke.epoch, 0), revoke.generation)
            for read in self.reads:
                mine = (read.reader, read.post.leg.p_epoch) == (revoke.epoch, prefill.epoch)
                if mine and read.post.grant.generation <= revoke.generation and read.right is None:
                    read.refused = True
            self.lent(prefill, Revoked(Proof.fenced(revoke.epoch, revoke.generation)))
        else:
            self.lent(prefill, NotRevoked(revoke.epoch, revoke.generation))

    def mail(self, prefill: Prefill, heard: Heard) -> None:
        self.lent(prefill if prefill.alive else self.current[prefill.rank], heard)  # its successor hears it

    # ------------------------------------------------------------ what the machines ask for

    def read(self, event: object) -> None:
        decode = self.decode
        for action in decode.reader.on(event):  # type: ignore[arg-type]
            match action:
                case Post(leg=leg, grant=Grant(generation=generation)):
                    there = self.prefills[leg.p_epoch].fenced.get(decode.epoch, 0)
                    here = self.barred.get((decode.epoch, leg.p_epoch), 0)
                    refused = generation <= max(there, here)
                    self.reads.append(Read(action, decode.epoch, refused=refused))
                case CheckGrant():
                    decode.checks.append(action)
                case TryDrain(leg):
                    decode.drains.append(leg)
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
            for rank in decode.reader.transfers[tid].ranks:
                assert self.written.get((decode.epoch, page, rank)) == (tid, True), "a hole, or another's bytes"
        assert not [read for read in self.reads if read.post.leg.tid == tid and not read.over], "more may land"

    def lent(self, prefill: Prefill, event: object) -> None:
        for action in prefill.lender.on(event):  # type: ignore[arg-type]
            match action:
                case Opened():
                    pass  # it is computed when `compute` chooses it
                case Lost(tid):
                    prefill.ledger.end(tid)
                case Closed(tid):
                    assert not prefill.ledger.knows(tid), "said to be closed, but held"
                case _:
                    self._common(prefill.epoch, action)

    decode_hears, prefill_hears = read, lent

    def _common(self, me: int, action: Action) -> None:
        if isinstance(action, Revoke):
            self.revokes.append((me, action))
        else:
            super()._common(me, action)

    # ------------------------------------------------------------ invariants and the end

    def consistent(self) -> None:
        self.check_books([self.decode.ledger, *(prefill.ledger for prefill in self.current.values())])
        for tid, transfer in self.decode.reader.transfers.items():
            for leg_rank, reading in self.decode.reader._readings(transfer).items():
                mine = [r for r in self.reads if r.post.leg.tid == tid and r.post.leg.p_rank == leg_rank]
                assert reading.count == sum(1 for read in mine if not read.told)
        for read in self.reads:
            leg, decode = read.post.leg, self._reader_of(read)
            if decode.alive and not read.over:
                assert decode.ledger.has(LeaseKey.write(leg)), f"{leg} may still land, and no lease says so"

    def quiesce(self) -> None:
        """Everything that can end ends: no loss, no new work, every clock ticks, every fence that exists is had."""
        for tid in list(self.decode.reader.transfers):
            self.read(End(tid, "shutting down"))
        for _ in range(14):
            self._notice_all()
            while any(not read.told and self._reader_of(read).alive for read in self.reads):
                self.outcome(1, unknown=False)
            for read in self.reads:
                if not read.over and read.right is not None:
                    self._land(read)
                elif not read.over:
                    read.refused = True
            while self.decode.checks:
                self.check(0)
            while self.revokes:
                self.fence(1, refuse=False)
            while self.decode.drains:
                self.drain(0)
            self.deliver_all()
            self.fire_all()
            self.ping(0)
            self.consistent()

    def _notice_all(self) -> None:
        for prefill in list(self.current.values()):
            for decode in self.decodes[:-1]:
                self.lent(prefill, PeerLost(decode.epoch, "decode died"))
            for tid in [t for t, transfer in prefill.lender.transfers.items() if transfer.state is COMPUTING]:
                self.lent(prefill, End(tid, "shutting down"))
        for epoch in self.dead_prefills():
            self.read(PeerLost(epoch, "prefill died"))

    def check_quiet(self) -> None:
        """Every drain was to be had, so everything closes on both sides."""
        assert not self.decode.reader.transfers, self.decode.reader.transfers
        assert self.decode.ledger.census().free == PAGES
        for prefill in self.current.values():
            assert not prefill.lender.transfers, prefill.lender.transfers
            assert not prefill.lender.tombstones
            assert prefill.ledger.census().free == PAGES
            assert not prefill.lender.in_force


MOVES: list[tuple[str, int]] = [
    ("request", 4),
    ("deliver", 60),
    ("compute", 12),
    ("take", 8),
    ("land", 6),
    ("outcome", 10),
    ("check", 6),
    ("fire", 5),
    ("end", 1),
    ("give_up", 1),
    ("ping", 1),
    ("drain", 2),
    ("fence", 3),
    ("notice", 1),
    ("notice_decode", 1),
    ("crash_prefill", 1),
]
