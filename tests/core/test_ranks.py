"""Guard H8: ranks of one engine agree, because one decides, once, in one log that all apply in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_rig import GENERATION, PAGES, TOKENS, D, P
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quiesce.core.ledger import Ledger
from quiesce.core.lender import Publish, State
from quiesce.core.lending import End, PeerLost, Revoked, Verified
from quiesce.core.machine import Action, Closed, Committed, Fired, Heard, Lost, Revoke, Send, Timer
from quiesce.core.messages import Abort, Done, Drained, Failed, FirstToken, HandOff, Leg, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind
from quiesce.core.ranks import Commit, Entry, Finish, Grow, Hold, Leader, RankLender, RanksDiffer, Release, Report


class Engine:
    """`ranks` ranks with 12 pages and 4 rows each. What they say to each other waits until it is delivered."""

    def __init__(self, ranks: int = 2, pages: int = 12) -> None:
        self.ledgers = [Ledger(PagePool(pages), PagePool(4, "rows")) for _ in range(ranks)]
        self.lenders = [RankLender(D, ledger, rank=rank) for rank, ledger in enumerate(self.ledgers)]
        self.leader = Leader(self.lenders[0], ranks)
        self.wire: list[tuple[int, Entry | Report]] = []
        self.seen: list[tuple[int, Action]] = []

    def reserve(self, pages: int = PAGES, ranks: dict[int, int] | None = None) -> TransferId | None:
        peers = {0: P} if ranks is None else ranks
        tid = self.leader.reserve(peers, room=1, pairing=b"p", tokens=TOKENS, pages=pages)
        self._send()
        return tid

    def offered(self) -> TransferId:
        tid = self.reserve()
        assert tid is not None
        self.deliver()
        for rank, lender in enumerate(self.lenders):
            self.carry(rank, lender.on(Publish(tid, 0, 0, GENERATION, 1000)))
        return tid

    def end(self, tid: TransferId) -> None:
        self.carry(0, self.leader.end(tid, "the client went away"))

    def say(self, rank: int, message: HandOff) -> None:
        self.carry(rank, self.lenders[rank].on(Heard(message, message.leg.p_epoch)))

    def done(self, rank: int, tid: TransferId, **changes: Any) -> None:
        leg = Leg(tid, rank, 0, P)
        self.say(rank, Done(**{"leg": leg, "pages": PAGES, "tokens": TOKENS, "result": FirstToken(7), **changes}))

    def drained(self, rank: int, tid: TransferId) -> None:
        self.say(rank, Drained(Leg(tid, rank, 0, P)))

    def carry(self, rank: int, actions: list[Action]) -> None:
        if rank == 0:
            actions = self.leader.hear_own(actions)
        for action in actions:
            self.seen.append((rank, action))
            if rank and type(action).__name__ == "Tell":
                self.wire.append((0, self.lenders[rank].report(action)))  # type: ignore[arg-type]
        self._send()

    def _send(self) -> None:
        others = range(1, len(self.lenders))
        self.wire += [(rank, entry) for entry in self.leader.new() for rank in others]

    def put(self, to: int, said: Entry | Report) -> None:
        if isinstance(said, Entry):
            self.carry(to, self.lenders[to].apply(said))
        else:
            self.carry(0, self.leader.hear(said))

    def deliver(self) -> None:
        """Everything, in order, until nothing is said any more."""
        while self.wire:
            self.put(*self.wire.pop(0))

    def repeat(self) -> None:
        """What both sides say again after everything under way was lost."""
        self.wire = list(self.leader.repeats())
        self.wire += [(0, report) for lender in self.lenders[1:] for report in lender.repeats()]

    def states(self, tid: TransferId) -> list[State | None]:
        known = [lender.transfers.get(tid) for lender in self.lenders]
        return [None if transfer is None else transfer.state for transfer in known]

    def free(self) -> list[int]:
        return [ledger.pool.free for ledger in self.ledgers]

    def of(self, kind: type) -> list[int]:
        return [rank for rank, action in self.seen if isinstance(action, kind)]


def test_h8_it_is_committed_once_it_has_landed_on_every_rank() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.done(0, tid)
    engine.deliver()
    assert engine.states(tid) == [State.LANDED, State.OFFERED] and not engine.of(Committed)
    engine.done(1, tid)
    engine.deliver()
    assert engine.states(tid) == [State.COMMITTED] * 2 and engine.of(Committed) == [0, 1]


def test_h8_a_failure_on_one_rank_is_given_up_on_all_and_a_late_done_commits_nothing() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.say(1, Failed(Leg(tid, 1, 0, P), "a write failed"))
    assert engine.states(tid) == [State.OFFERED] * 2, "no rank decides by itself"
    engine.done(0, tid)
    engine.deliver()
    assert engine.states(tid)[1] is State.HOLDING and engine.of(Lost) == [0, 1] and not engine.of(Committed)
    causes = [action.message.reason for _, action in engine.seen if isinstance(action, Send)
              and isinstance(action.message, Abort)]  # fmt: skip
    assert set(causes) == {"a write failed"}, "the first cause, also where it was not seen"


def test_h8_a_failure_that_is_known_keeps_a_rank_from_landing() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.say(1, Failed(Leg(tid, 1, 0, P), "a write failed"))
    engine.wire.clear()
    engine.done(1, tid)
    assert engine.states(tid)[1] is State.OFFERED and not engine.wire
    engine.repeat()
    engine.deliver()
    assert engine.lenders[1].transfers == {} and engine.states(tid)[0] is State.HOLDING


def test_h8_a_failure_after_the_decision_changes_nothing() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.done(1, tid)
    engine.deliver()
    engine.done(0, tid)
    assert engine.states(tid) == [State.COMMITTED, State.LANDED]
    engine.carry(1, engine.lenders[1].on(Fired(Timer.DEADLINE, tid, 0)))
    engine.deliver()
    assert engine.states(tid) == [State.COMMITTED] * 2


def test_h8_pages_stay_on_every_rank_until_every_rank_has_proven() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.end(tid)
    engine.deliver()
    engine.drained(1, tid)
    engine.deliver()
    assert engine.free() == [9, 9] and engine.states(tid) == [State.HOLDING, None]
    assert [ledger.leases(tid) for ledger in engine.ledgers][1] == (LeaseKey.ranks(tid),)
    assert engine.reserve(pages=10) is None, "what one rank could take, the other could not"
    engine.drained(0, tid)
    assert engine.free() == [12, 9], "the log has not reached the other yet"
    big = engine.reserve(pages=12)
    assert big is not None
    engine.deliver()
    assert engine.free() == [0, 0] and engine.of(Closed) == [0, 1]
    assert all(ledger.knows(big) and not ledger.knows(tid) for ledger in engine.ledgers)


def test_h8_entries_are_applied_in_their_order_and_once() -> None:
    engine = Engine()
    one, two = engine.reserve(), engine.reserve()
    assert one is not None and two is not None
    engine.end(one)
    entries = [said for _, said in engine.wire]
    lender = engine.lenders[1]
    for entry in reversed(entries):
        assert isinstance(entry, Entry)
        assert lender.applied in (0, 3)
        engine.put(1, entry)
    assert lender.applied == 3 and list(lender.transfers) == [two]
    before = engine.ledgers[1].census()
    for entry in entries:
        engine.put(1, entry)
    assert engine.ledgers[1].census() == before and lender.applied == 3


def test_h8_what_is_lost_between_the_ranks_is_said_again_until_it_is_answered() -> None:
    engine = Engine(3)
    tid = engine.reserve()
    engine.wire.clear()
    assert [(rank, entry.seq) for rank, entry in engine.leader.repeats()] == [(1, 1), (2, 1)]
    engine.repeat()
    engine.deliver()
    assert tid is not None and [lender.applied for lender in engine.lenders] == [1, 1, 1]
    engine.end(tid)
    engine.wire.clear()
    for _ in range(4):
        engine.repeat()
        engine.deliver()
    assert engine.free() == [12, 12, 12] and not engine.leader.log and not engine.leader.judged
    assert [lender.repeats() for lender in engine.lenders[1:]] == [
        [Report(D, 1, 3)],
        [Report(D, 2, 3)],
    ], "nothing is owed an answer any more"


def test_h8_a_leader_with_too_long_a_log_admits_nothing() -> None:
    engine = Engine()
    engine.leader.most_log = 2
    assert engine.reserve() and engine.reserve() and engine.reserve() is None
    engine.deliver()
    engine.repeat()
    engine.deliver()
    assert engine.reserve(), "the others have caught up"


def test_h8_a_running_request_ends_everywhere_and_waits_for_the_steps_of_every_rank() -> None:
    engine = Engine()
    tid = engine.reserve(ranks={})
    assert tid is not None
    engine.deliver()
    step = LeaseKey.compute(tid)
    engine.ledgers[1].lend(step)
    assert engine.leader.grow(tid, 2) and not engine.leader.grow(tid, 99)
    engine._send()
    engine.end(tid)
    engine.end(tid)
    engine.deliver()
    assert engine.free() == [7, 7], "a step of one rank still writes"
    engine.ledgers[1].close(step, Proof.spoken(ProofKind.COMPLETED, step))
    engine.carry(1, engine.lenders[1].settle())
    engine.deliver()
    assert engine.free() == [12, 12]


def test_h8_a_committed_request_is_finished_through_the_log() -> None:
    engine = Engine()
    tid = engine.offered()
    for rank in (0, 1):
        engine.done(rank, tid)
    engine.deliver()
    engine.end(tid)
    assert engine.free() == [9, 9]
    engine.deliver()
    assert engine.free() == [12, 12] and engine.of(Closed) == [0, 1]
    assert [ledger.not_idle() for ledger in engine.ledgers] == [[], []]


def test_h8_a_foreign_writer_on_one_rank_keeps_the_pages_of_all() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.done(0, tid)
    engine.done(1, tid, digest=b"d")
    engine.carry(1, engine.lenders[1].on(Verified(tid, False, frozenset({P}))))
    engine.deliver()
    assert engine.states(tid) == [None, State.QUARANTINE] and engine.free() == [9, 9] and not engine.of(Committed)
    engine.carry(1, engine.lenders[1].on(Revoked(Proof.fenced(P, GENERATION))))
    engine.deliver()
    assert engine.free() == [12, 12]


def test_h8_a_dead_peer_is_asked_for_once_the_log_has_given_it_up() -> None:
    engine = Engine()
    tid = engine.offered()
    engine.carry(1, engine.lenders[1].on(PeerLost(P, "died")))
    assert not engine.of(Revoke)
    engine.deliver()
    asked = [(rank, action.dead) for rank, action in engine.seen if isinstance(action, Revoke)]
    assert asked == [(1, True)], "the other has not heard of its death yet"
    for rank in (0, 1):
        engine.carry(rank, engine.lenders[rank].on(Revoked(Proof.gone(P, GENERATION))))
    engine.deliver()
    assert engine.free() == [12, 12] and tid not in engine.lenders[0].transfers


def test_h8_what_was_never_published_is_free_at_once_on_all() -> None:
    engine = Engine()
    tid = engine.reserve()
    assert tid is not None
    engine.end(tid)
    engine.deliver()
    assert engine.free() == [12, 12]


def test_h8_what_another_engine_says_is_dropped() -> None:
    engine = Engine()
    tid = engine.offered()
    stale = engine.lenders[1].stale
    engine.put(1, Entry(D + 1, 2, Hold(tid, "an older engine's")))
    engine.put(0, Report(D + 1, 1, 9, "failed", tid))
    engine.put(0, Report(D, 7, 9, "failed", tid))
    assert engine.states(tid) == [State.OFFERED] * 2 and engine.lenders[1].stale == stale + 1


@pytest.mark.parametrize("what", [Commit, Release, Grow, Finish])
def test_h8_a_rank_that_cannot_do_what_was_decided_ends_its_engine(what: type) -> None:
    engine = Engine()
    tid = engine.offered()
    decision = what(tid, 99) if what is Grow else what(tid, "over") if what is Finish else what(tid)
    with pytest.raises(RanksDiffer):
        engine.put(1, Entry(D, 2, decision))


HAPPENS = ("publish", "done", "failed", "drained", "end", "lost", "leader")


class Ranks(RuleBasedStateMachine):
    """Three ranks, a peer that may do anything, and a network between the ranks that loses, repeats and reorders."""

    @initialize()
    def start(self) -> None:
        self.engine = Engine(3, pages=6)
        self.sent: list[tuple[int, Entry | Report]] = []
        self.choose = random.Random(1)

    def tids(self) -> list[TransferId]:
        return [tid for lender in self.engine.lenders for tid in lender.transfers]

    def keep(self) -> None:
        self.sent += self.engine.wire
        self.engine.wire.clear()

    @rule(pages=st.integers(1, 3))
    def reserve(self, pages: int) -> None:
        self.engine.reserve(pages)
        self.keep()

    @rule(pick=st.integers(0, 99), rank=st.integers(0, 2), what=st.sampled_from(HAPPENS))
    def happens(self, pick: int, rank: int, what: str) -> None:
        tids, engine = self.tids(), self.engine
        if not tids:
            return
        tid = tids[pick % len(tids)]
        lender = engine.lenders[rank]
        transfer = lender.transfers.get(tid)
        pages = len(engine.ledgers[rank].pages(tid)) if engine.ledgers[rank].knows(tid) else 0
        match what:
            case "publish" if transfer is not None:
                engine.carry(rank, lender.on(Publish(tid, 0, 0, 1, 1000)))
            case "done" if transfer is not None:
                engine.done(rank, tid, pages=pages)
            case "failed":
                engine.say(rank, Failed(Leg(tid, rank, 0, P), "failed"))
            case "drained":
                engine.drained(rank, tid)
            case "end":
                engine.carry(rank, lender.on(End(tid, "a deadline")))
            case "lost":
                engine.carry(rank, lender.on(PeerLost(P, "gone")))
            case "leader":
                engine.end(tid)
        self.keep()

    @rule(pick=st.integers(0, 999))
    def deliver(self, pick: int) -> None:
        if self.sent:
            self.engine.put(*self.sent[-1 - pick % len(self.sent)])
            self.keep()

    @rule()
    def catch_up(self) -> None:
        for _ in range(3):
            self.engine.repeat()
            self.sent += self.engine.wire
            self.engine.deliver()

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        known = [(tid, t.state) for lender in self.engine.lenders for tid, t in lender.transfers.items()]
        committed = {tid for tid, state in known if state is State.COMMITTED}
        assert not committed & {tid for tid, state in known if state is State.HOLDING}
        places: dict[int, Any] = {}
        for lender, ledger in zip(self.engine.lenders, self.engine.ledgers, strict=True):
            here = set(ledger._holdings), ledger.pool.free
            assert places.setdefault(lender.applied, here) == here

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for tid in self.tids():
            engine.end(tid)
        for _ in range(8):
            engine.repeat()
            engine.deliver()
            for rank, lender in enumerate(engine.lenders):
                for tid in list(lender.transfers):
                    engine.drained(rank, tid)
        assert engine.free() == [6, 6, 6] and not engine.leader.judged and not engine.leader.log


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
