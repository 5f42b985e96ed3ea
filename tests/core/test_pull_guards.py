"""Guards of pull: a source page is kept while somebody may read it; what was read is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core_rig import LATER_P, P1, PAGES, TOKENS, D, P, only, sent

from quiesce.core.borrowing import DrainSaid, PostEnded
from quiesce.core.closed_set import Ids
from quiesce.core.ledger import Ledger
from quiesce.core.lending import End, NotRevoked, PeerLost, Revoked, State
from quiesce.core.machine import (
    Action,
    Arm,
    CheckGrant,
    Closed,
    Committed,
    Fired,
    Heard,
    Lost,
    Opened,
    Post,
    Revoke,
    Timer,
    TryDrain,
)
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Check,
    Done,
    Drained,
    Failed,
    FirstToken,
    Grant,
    HandOff,
    Leg,
    Offer,
    Ping,
    Refused,
    Request,
    Standing,
    Tainted,
    TransferId,
)
from quiesce.core.pages import PagePool
from quiesce.core.posting import Outcome
from quiesce.core.proofs import LeaseKey, Proof
from quiesce.core.pull_lender import PullLender
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import ASKED, CHECK, COMPUTING, GIVEN_UP, LENT, READING, Ask, Checked, Computed, ReaderUp


class SourceRig:
    """The prefill rank, with 12 source pages; the reader is played by the test."""

    def __init__(self, **options: Any) -> None:
        self.ledger = Ledger(PagePool(12), PagePool(4, "rows"))
        self.lender = PullLender(P, self.ledger, **options)
        self.lender.on(ReaderUp(D))
        self.counter = 0

    def leg(self, seq: int = 1, p_epoch: int = P) -> Leg:
        return Leg(TransferId(D, seq), 0, 0, p_epoch)

    def request(self, leg: Leg) -> list[Action]:
        return self.hear(Request(leg, 1, b"p", TOKENS, 0, 1000))

    def computed(self, leg: Leg, pairing: bytes = b"p", generation: int = 1) -> list[Action]:
        if not self.ledger.knows(leg.tid):
            assert self.ledger.own(leg.tid, PAGES) is not None
        return self.lender.on(Computed(leg.tid, pairing, TOKENS, 0, generation, 900, FirstToken(11)))

    def lent(self, seq: int = 1, generation: int = 1) -> Leg:
        leg = self.leg(seq)
        self.request(leg)
        (offer,) = sent(self.computed(leg, generation=generation), Offer)
        assert self.lender.in_force[leg] == offer.grant.generation
        return leg

    def holding(self, seq: int = 1, generation: int = 1) -> Leg:
        leg = self.lent(seq, generation)
        self.lender.on(End(leg.tid, "the client went away"))
        assert self.state(leg) is State.HOLDING
        return leg

    def state(self, leg: Leg) -> State | None:
        transfer = self.lender.transfers.get(leg.tid)
        return None if transfer is None else transfer.state

    def generation(self, leg: Leg) -> int:
        return self.lender.transfers[leg.tid].published[0].offer.grant.generation

    def hear(self, message: HandOff, speaker: int = D) -> list[Action]:
        return self.lender.on(Heard(message, speaker))

    def fire(self, timer: Timer, leg: Leg) -> list[Action]:
        return self.lender.on(Fired(timer, leg.tid, 0))

    def ping(self, high: int, listed: tuple[int, ...] = (), reading: tuple[int, ...] = ()) -> list[Action]:
        self.counter += 1
        return self.lender.on(Heard(Ping(D, 0, 0, self.counter, high, list(listed), reading), D))

    def kept(self, leg: Leg) -> bool:
        return self.ledger.knows(leg.tid) and self.ledger.census().free <= 12 - PAGES


class ReaderRig:
    """The decode rank, with 12 destination pages; the source is played by the test."""

    def __init__(self, ranks: dict[int, int] | None = None, **options: Any) -> None:
        self.ledger = Ledger(PagePool(12), PagePool(4, "rows"))
        self.reader = PullReader(D, self.ledger, **options)
        self.ranks = ranks or {0: P}

    def asked(self) -> TransferId:
        tid = self.reader.reserve(self.ranks, room=1, pairing=b"p", tokens=TOKENS, pages=PAGES)
        assert tid is not None
        assert len(sent(self.reader.on(Ask(tid, 1000)), Request)) == len(self.ranks)
        return tid

    def leg(self, tid: TransferId, rank: int = 0) -> Leg:
        return Leg(tid, 0, rank, self.ranks[rank])

    def offer(self, tid: TransferId, rank: int = 0, **changes: Any) -> Offer:
        grant = Grant(0, 5, tuple(range(100, 100 + PAGES)))
        what = {"leg": self.leg(tid, rank), "room": 1, "pairing": b"p", "grant": grant, "tokens": TOKENS, "prefix": 0}
        return Offer(**{**what, "remaining_ms": 900, "result": FirstToken(11), **changes})

    def reading(self) -> tuple[TransferId, list[Post]]:
        tid = self.asked()
        posts = only(self.hear(self.offer(tid)), Post)
        assert posts
        return tid, posts

    def checking(self) -> tuple[TransferId, list[Action]]:
        tid, posts = self.reading()
        actions = [action for post in posts for action in self.ended(post)]
        assert self.state(tid) is CHECK
        return tid, actions

    def check(self, tid: TransferId, epoch: int = P, generation: int | None = 5, rank: int = 0) -> list[Action]:
        return self.reader.on(Checked(self.leg(tid, rank), epoch, generation))

    def ended(self, post: Post, outcome: Outcome = Outcome.PLACED) -> list[Action]:
        return self.reader.on(PostEnded(post.leg, post.number, outcome))

    def end(self, tid: TransferId) -> list[Action]:
        return self.reader.on(End(tid, "the client went away"))

    def hear(self, message: HandOff, speaker: int | None = None) -> list[Action]:
        return self.reader.on(Heard(message, message.leg.p_epoch if speaker is None else speaker))

    def fire(self, timer: Timer, tid: TransferId) -> list[Action]:
        return self.reader.on(Fired(timer, tid, 0))

    def state(self, tid: TransferId) -> State | None:
        transfer = self.reader.transfers.get(tid)
        return None if transfer is None else transfer.state

    def free(self) -> int:
        return self.ledger.census().free


# ---------------------------------------------------------------- the good way


def test_a_pull_commits_and_returns_the_source_pages():
    source, reader = SourceRig(), ReaderRig()
    tid = reader.reader.reserve({0: P}, room=1, pairing=b"p", tokens=TOKENS, pages=PAGES)
    assert tid is not None
    (request,) = sent(reader.reader.on(Ask(tid, 1000)), Request)
    actions = source.hear(request)
    assert sent(actions, Accept) and only(actions, Opened) == [Opened(request.leg)]
    (offer,) = sent(source.computed(request.leg), Offer)
    assert offer.result == FirstToken(11) and offer.grant.pages == source.ledger.pages(tid)
    (post,) = only(reader.hear(offer), Post)
    assert (post.source, post.destination) == (offer.grant.pages, reader.ledger.pages(tid))
    assert only(reader.ended(post), CheckGrant) == [CheckGrant(offer.leg, offer.grant)]
    actions = reader.reader.on(Checked(offer.leg, P, offer.grant.generation))
    assert only(actions, Committed) == [Committed(tid, FirstToken(11))]
    (done,) = sent(actions, Done)
    assert only(source.hear(done), Closed) and source.ledger.census().free == 12
    assert sent(reader.hear(offer), Done), "an OFFER that comes again is answered by DONE"
    assert only(reader.end(tid), Closed) and reader.free() == 12


def test_ids_of_pull_and_push_are_one_sequence():
    ids = Ids(D)
    first, second = ReaderRig(ids=ids), ReaderRig(ids=ids)
    assert (first.asked(), second.asked()) == (TransferId(D, 1), TransferId(D, 2))
    listed = [*first.reader.listed(), *second.reader.listed()]
    assert ids.closed_set(listed) == (1, 2, [1, 2])


# ---------------------------------------------------------------- N10


@pytest.mark.parametrize("how", ["client", "deadline", "unknown"])
def test_n10_a_reader_that_gives_up_with_reads_under_way_says_failed_until_it_is_heard(how: str):
    rig = ReaderRig(batch=1)
    tid, posts = rig.reading()
    if how == "client":
        actions = rig.end(tid)
    else:
        actions = rig.fire(Timer.DEADLINE, tid) if how == "deadline" else rig.ended(posts[0], Outcome.UNKNOWN)
    assert sent(actions, Failed) and rig.state(tid) is GIVEN_UP
    assert sent(rig.fire(Timer.REPEAT, tid), Failed), "FAILED may have got lost"
    rig.hear(Ack(rig.leg(tid)))
    assert not sent(rig.fire(Timer.REPEAT, tid), Failed)


def test_n10_a_reader_with_nothing_under_way_says_drained_and_frees_at_once():
    rig = ReaderRig()
    for tid in (rig.asked(), rig.checking()[0]):
        actions = rig.end(tid)
        assert sent(actions, Drained) and not sent(actions, Failed) and only(actions, Closed)
    assert rig.free() == 12 and rig.reader.listed() == []


def test_n10_only_what_is_being_read_is_listed_as_reading():
    rig = ReaderRig(batch=1, window=9)
    tid = rig.asked()
    assert (rig.reader.listed(), rig.reader.reading()) == ([1], ())
    (first, *_) = posts = only(rig.hear(rig.offer(tid)), Post)
    assert (rig.reader.listed(), rig.reader.reading()) == ([1], (1,))
    rig.ended(first, Outcome.UNKNOWN)
    for post in posts[1:]:
        rig.ended(post)
    assert (rig.reader.listed(), rig.reader.reading()) == ([1], ()), "given up: listed, for it is tainted; not read"


def test_n10_a_ping_renews_only_what_is_listed_as_reading():
    rig = SourceRig()
    first, second = rig.lent(1), rig.lent(2)
    assert [(a.timer, a.about) for a in only(rig.ping(2, (1, 2), (2,)), Arm)] == [(Timer.LEASE, second.tid)]
    assert only(rig.ping(2, (1, 2), ()), Arm) == []
    rig.fire(Timer.LEASE, first)
    assert rig.state(first) is State.HOLDING and rig.state(second) is LENT


def test_n10_an_old_ping_renews_nothing():
    rig = SourceRig()
    rig.lent()
    old = Ping(D, 0, 0, 1, 1, [1], (1,))
    rig.counter = 1
    assert only(rig.ping(1, (1,), (1,)), Arm)
    assert rig.lender.on(Heard(old, D)) == []


def test_n10_no_ping_goes_beyond_the_deadline():
    rig = SourceRig()
    leg = rig.leg()
    (deadline,) = [arm for arm in only(rig.request(leg), Arm) if arm.timer is Timer.DEADLINE]
    assert deadline.delay_ms == 1000
    actions = rig.computed(leg) + rig.ping(1, (1,), (1,)) + rig.ping(1, (1,), (1,))
    assert Timer.DEADLINE not in [arm.timer for arm in only(actions, Arm)], "armed once"
    assert sent(rig.fire(Timer.DEADLINE, leg), Abort) and rig.state(leg) is State.HOLDING


def test_n10_failed_is_answered_by_abort_and_no_ping_renews_it_any_more():
    rig = SourceRig()
    leg = rig.lent()
    actions = rig.hear(Failed(leg, "gave up"))
    assert sent(actions, Ack) and sent(actions, Abort) and rig.state(leg) is State.HOLDING
    assert only(rig.ping(1, (1,), (1,)), Arm) == []
    assert only(rig.fire(Timer.HOLD, leg), Revoke), "and the fence comes"
    assert sent(rig.hear(Failed(leg, "gave up")), Ack), "ACK of anything"
    rig.hear(Drained(leg))
    assert sent(rig.hear(Failed(leg, "gave up")), Ack)


def test_n10_silence_starts_abort_and_then_a_fence_and_frees_nothing():
    rig = SourceRig()
    leg = rig.lent()
    assert sent(rig.fire(Timer.LEASE, leg), Abort)
    assert only(rig.fire(Timer.HOLD, leg), Revoke) == [Revoke(D, 1, dead=False)]
    rig.lender.on(NotRevoked(D, 1))
    assert rig.kept(leg) and rig.ledger.census().retained == PAGES
    assert only(rig.fire(Timer.REFENCE, leg), Revoke)


# ---------------------------------------------------------------- L10


def test_l10_the_check_begins_after_the_last_placed():
    rig = ReaderRig(batch=1, window=2)
    tid, posts = rig.reading()
    assert len(posts) == 2
    assert rig.check(tid) == [], "nobody asked for it yet"
    actions = rig.ended(posts[0])
    (third,) = only(actions, Post)
    actions += rig.ended(posts[1])
    assert not only(actions, CheckGrant) and rig.check(tid) == []
    assert len(only(rig.ended(third), CheckGrant)) == 1
    assert only(rig.check(tid), Committed)


def test_l10_the_check_begins_after_the_last_placed_of_every_rank():
    rig = ReaderRig({0: P, 1: P1})
    tid = rig.asked()
    (first,) = only(rig.hear(rig.offer(tid, 0)), Post)
    assert not only(rig.ended(first), CheckGrant)
    (second,) = only(rig.hear(rig.offer(tid, 1, result=None)), Post)
    assert len(only(rig.ended(second), CheckGrant)) == 2
    assert not only(rig.check(tid, P), Committed)
    assert only(rig.check(tid, P1, rank=1), Committed)


@pytest.mark.parametrize(("epoch", "generation"), [(P, 6), (P, None), (LATER_P, 5), (0, None)])
def test_l10_what_was_taken_back_before_the_check_is_never_committed(epoch: int, generation: int | None):
    rig = ReaderRig()
    tid, _ = rig.checking()
    actions = rig.check(tid, epoch, generation)
    assert only(actions, Lost) and not only(actions, Committed) and not sent(actions, Done)
    assert rig.free() == 12
    assert rig.check(tid) == [], "given up for good"


ENDS: dict[str, Callable[[SourceRig, Leg], Any]] = {
    "done": lambda rig, leg: rig.hear(Done(leg, PAGES, TOKENS)),
    "drained": lambda rig, leg: rig.hear(Drained(leg)),
    "closed set": lambda rig, leg: rig.ping(leg.tid.seq),
    "fenced": lambda rig, leg: rig.lender.on(Revoked(Proof.fenced(D, rig.generation(leg)))),
    "gone": lambda rig, leg: (rig.lender.on(PeerLost(D, "died")), rig.lender.on(Revoked(Proof.gone(D, 9)))),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("state", ["lent", "holding"])
def test_l10_the_generation_ends_before_a_page_is_free(state: str, how: str):
    rig = SourceRig()
    leg = rig.lent() if state == "lent" else rig.holding()
    seen: list[bool] = []
    rig.ledger.observe = lambda change: seen.append(leg in rig.lender.in_force)
    ENDS[how](rig, leg)
    assert rig.ledger.census().free == 12 and rig.lender.transfers == {}
    assert seen and not any(seen[-2:]), "in force while the lease closed or the pages returned"


def test_l10_an_operators_waiver_ends_the_generation_too():
    rig = SourceRig(expiry="release")
    leg = rig.holding()
    assert only(rig.fire(Timer.HOLD, leg), Closed)
    assert leg not in rig.lender.in_force and rig.ledger.unsound == 1


@pytest.mark.parametrize("timer", [Timer.LEASE, Timer.DEADLINE, Timer.REPEAT, Timer.HOLD, Timer.REFENCE])
def test_l10_that_the_reader_checks_never_entitles_the_source_to_free(timer: Timer):
    rig = SourceRig()
    leg = rig.lent()
    for _ in range(3):
        rig.fire(timer, leg)
        rig.ping(1, (1,), ())
    assert rig.kept(leg) and rig.ledger.has(LeaseKey.source(leg))


@pytest.mark.parametrize("how", ENDS)
def test_l10_the_source_answers_what_is_true_when_it_is_asked(how: str):
    rig = SourceRig()
    leg = rig.leg()
    rig.request(leg)
    assert sent(rig.hear(Check(leg, 7)), Standing) == [Standing(leg, 7, None)], "nothing is lent yet"
    rig.computed(leg)
    assert sent(rig.hear(Check(leg, 8)), Standing) == [Standing(leg, 8, rig.generation(leg))]
    rig.lender.on(End(leg.tid, "the client went away"))
    assert sent(rig.hear(Check(leg, 9)), Standing) == [Standing(leg, 9, rig.generation(leg))], "held: still lent"
    ENDS[how](rig, leg)
    assert sent(rig.hear(Check(leg, 10)), Standing) == [Standing(leg, 10, None)]


def test_l10_a_successor_of_the_source_never_answers_for_it():
    rig = SourceRig()
    assert sent(rig.hear(Check(rig.leg(p_epoch=LATER_P), 7)), Refused) == [
        Refused(rig.leg(p_epoch=LATER_P), "wrong epoch")
    ]
    stranger = Leg(TransferId(D + 1, 1), 0, 0, P)
    assert rig.hear(Check(stranger, 7)) == [], "said over a session of another decode engine"


# ---------------------------------------------------------------- H14 and the rest of holding, at the source

GIVE_UPS: dict[str, Callable[[SourceRig, Leg], Any]] = {
    "end": lambda rig, leg: rig.lender.on(End(leg.tid, "cancelled")),
    "deadline": lambda rig, leg: rig.fire(Timer.DEADLINE, leg),
    "lease": lambda rig, leg: rig.fire(Timer.LEASE, leg),
    "failed": lambda rig, leg: rig.hear(Failed(leg, "gave up")),
    "new epoch": lambda rig, leg: rig.lender.on(PeerLost(D, "restarted")),
}


@pytest.mark.parametrize("cause", GIVE_UPS)
def test_h14_source_pages_are_kept_from_lent_until_a_proof(cause: str):
    rig = SourceRig()
    leg = rig.lent()
    assert rig.ledger.has(LeaseKey.source(leg)), "recorded with the OFFER, not with the first read"
    GIVE_UPS[cause](rig, leg)
    for message in (Busy(leg, 2), Tainted(leg), Failed(leg, "again")):
        rig.hear(message)
    assert rig.kept(leg) and rig.state(leg) is State.HOLDING
    rig.hear(Drained(Leg(TransferId(D, 9), 0, 0, P))), rig.hear(Drained(leg), speaker=0xD1)
    assert rig.kept(leg), "a proof about another transfer, or of another epoch"
    assert only(rig.hear(Drained(leg)), Closed) and rig.ledger.census().free == 12


def test_h14_ending_the_request_of_a_lent_page_does_not_free_it():
    rig = SourceRig()
    leg = rig.lent()
    rig.ledger.end(leg.tid)
    assert rig.kept(leg)


def test_h14_what_was_never_lent_is_free_at_once_and_the_reader_is_told():
    rig = SourceRig()
    leg = rig.leg()
    rig.request(leg)
    assert rig.ledger.own(leg.tid, PAGES)
    actions = rig.lender.on(End(leg.tid, "the engine failed"))
    assert [abort.reason for abort in sent(actions, Abort)] == ["the engine failed"]
    assert only(actions, Closed) and rig.ledger.census().free == 12
    assert [refused.reason for refused in sent(rig.request(leg), Refused)] == ["ended"]


def test_l9_nothing_is_lent_about_another_prompt():
    rig = SourceRig()
    leg = rig.leg()
    rig.request(leg)
    actions = rig.computed(leg, b"q")
    assert not sent(actions, Offer) and sent(actions, Abort)[0].reason.startswith("pairing: ")
    reader = ReaderRig()
    tid = reader.asked()
    actions = reader.hear(reader.offer(tid, pairing=b"q"))
    assert only(actions, Lost) and not only(actions, Post)


def test_h16_a_fence_closes_only_what_was_granted_under_it():
    rig = SourceRig()
    first, second = rig.holding(1), rig.holding(2, generation=2)
    rig.lender.on(Revoked(Proof.fenced(D, rig.generation(first))))
    assert not rig.ledger.knows(first.tid) and rig.kept(second)


def test_n5_a_request_that_comes_late_opens_nothing():
    rig = SourceRig()
    leg = rig.lent()
    rig.hear(Done(leg, PAGES, TOKENS))
    assert [refused.reason for refused in sent(rig.request(leg), Refused)] == ["ended"]
    rig.ping(1)
    assert rig.lender.tombstones == set()
    assert [refused.reason for refused in sent(rig.request(leg), Refused)] == ["closed"]
    rig.lender.on(PeerLost(D, "died"))
    rig.lender.on(ReaderUp(D))
    assert [refused.reason for refused in sent(rig.request(rig.leg(7)), Refused)] == ["unknown epoch"]
    old = rig.leg(8, p_epoch=LATER_P)
    assert [refused.reason for refused in sent(rig.request(old), Refused)] == ["wrong epoch"]


def test_d7_a_source_that_is_full_refuses_and_evicts_nothing():
    rig = SourceRig(max_records=2)
    rig.hear(Done(rig.lent(1), PAGES, TOKENS))
    rig.lent(2)
    assert [refused.reason for refused in sent(rig.request(rig.leg(3)), Refused)] == ["full"]
    assert len(rig.lender.tombstones) == 1 and len(rig.lender.transfers) == 1


def test_a_request_that_comes_again_gets_the_current_answer():
    rig = SourceRig()
    leg = rig.leg()
    rig.request(leg)
    actions = rig.request(leg)
    assert sent(actions, Accept) and not only(actions, Opened) and rig.state(leg) is COMPUTING
    rig.computed(leg)
    assert sent(rig.request(leg), Offer)
    rig.lender.on(End(leg.tid, "gone"))
    assert sent(rig.request(leg), Abort)


# ---------------------------------------------------------------- the same at the reader


def test_h14_destination_pages_are_kept_while_a_read_may_still_land():
    rig = ReaderRig(batch=1, window=9)
    tid, posts = rig.reading()
    rig.end(tid)
    for post in posts[:-1]:
        rig.ended(post)
        assert rig.free() == 12 - PAGES and rig.reader.listed() == [1]
    assert only(rig.ended(posts[-1], Outcome.FAILED_CLEAN), Closed)
    assert rig.free() == 12 and rig.reader.listed() == []


def test_a9_an_unknown_read_taints_and_only_a_drain_or_our_own_fence_ends_that():
    for proof in ("drain", "fence"):
        rig = ReaderRig()
        tid, (post,) = rig.reading()
        actions = rig.ended(post, Outcome.UNKNOWN)
        assert only(actions, TryDrain) and only(actions, Revoke) == [Revoke(P, 5, dead=False)]
        assert sent(rig.hear(Abort(rig.leg(tid), "stop")), Tainted)
        rig.reader.on(DrainSaid(rig.leg(tid), proven=False))
        rig.reader.on(NotRevoked(P, 5))
        rig.reader.on(PeerLost(P, "died"))
        rig.reader.on(Revoked(Proof.gone(P, 5)))
        assert rig.free() == 12 - PAGES and rig.reader.listed() == [1], "its death is no proof about our own reads"
        event = DrainSaid(rig.leg(tid), proven=True) if proof == "drain" else Revoked(Proof.fenced(P, 5))
        assert only(rig.reader.on(event), Closed) and rig.free() == 12
        assert sent(rig.hear(Abort(rig.leg(tid), "stop")), Drained)


def test_a15_a_drain_is_asked_for_again_when_no_fence_was_to_be_had():
    rig = ReaderRig()
    tid, (post,) = rig.reading()
    rig.ended(post, Outcome.UNKNOWN)
    rig.reader.on(DrainSaid(rig.leg(tid), proven=False))
    (again,) = [arm for arm in only(rig.reader.on(NotRevoked(P, 5)), Arm) if arm.timer is Timer.REFENCE]
    actions = rig.fire(again.timer, tid)
    assert only(actions, TryDrain) and only(actions, Revoke), "prefill may be done with it and say ABORT no more"
    assert only(rig.reader.on(DrainSaid(rig.leg(tid), proven=True)), Closed) and rig.free() == 12


def test_a3_whoever_brings_the_count_to_zero_answers():
    rig = ReaderRig()
    tid, (post,) = rig.reading()
    actions = rig.hear(Abort(rig.leg(tid), "stop"))
    assert [busy.posts for busy in sent(actions, Busy)] == [1]
    assert not sent(actions, Failed), "it was asked to: it need not be told"
    assert sent(rig.ended(post), Drained) and rig.free() == 12


def test_a2_nothing_is_read_after_giving_up():
    rig = ReaderRig(batch=1, window=1)
    tid, (post,) = rig.reading()
    rig.end(tid)
    assert not only(rig.ended(post), Post) and rig.free() == 12


def test_a_late_offer_opens_nothing_and_is_answered_drained():
    rig = ReaderRig()
    tid = rig.asked()
    rig.end(tid)
    actions = rig.hear(rig.offer(tid))
    assert sent(actions, Drained) and not only(actions, Post)
    never = rig.offer(TransferId(D, 99))
    assert rig.hear(never) == [], "an id that was never minted"


@pytest.mark.parametrize("state", ["asked", "reading", "check"])
@pytest.mark.parametrize("cause", ["abort", "deadline", "new epoch", "refused by the successor", "end"])
def test_every_state_under_way_gives_up_by_the_same_door(state: str, cause: str):
    rig = ReaderRig()
    if state == "asked":
        tid = rig.asked()
        assert rig.state(tid) is ASKED
    elif state == "reading":
        tid, _ = rig.reading()
        assert rig.state(tid) is READING
    else:
        tid, _ = rig.checking()
    leg = rig.leg(tid)
    causes: dict[str, Callable[[], list[Action]]] = {
        "abort": lambda: rig.hear(Abort(leg, "stop")),
        "deadline": lambda: rig.fire(Timer.DEADLINE, tid),
        "new epoch": lambda: rig.reader.on(PeerLost(P, "restarted")),
        "refused by the successor": lambda: rig.hear(Refused(leg, "wrong epoch"), speaker=LATER_P),
        "end": lambda: rig.end(tid),
    }
    assert len(only(causes[cause](), Lost)) == 1
    assert not only(rig.check(tid), Committed)
    assert (rig.free() == 12) == (state != "reading")


def test_l5_what_is_offered_is_compared_with_what_was_asked_for():
    short = Grant(0, 5, (100, 101))
    for wrong in ({"tokens": TOKENS - 1}, {"prefix": 16}, {"grant": short}):
        rig = ReaderRig()
        tid = rig.asked()
        actions = rig.hear(rig.offer(tid, **wrong))
        assert only(actions, Lost) and sent(actions, Drained) and not only(actions, Post) and rig.free() == 12


def test_a_commit_needs_the_first_token():
    rig = ReaderRig()
    tid = rig.asked()
    (post,) = only(rig.hear(rig.offer(tid, result=None)), Post)
    rig.ended(post)
    actions = rig.check(tid)
    assert only(actions, Lost) and not only(actions, Committed)
