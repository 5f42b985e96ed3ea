"""Whatever ended a transfer, whatever comes late or twice: counted, ignored, nobody else's pages are touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.core_rig import GENERATION, P1, PAGES, TOKENS, BorrowerRig, D, LenderRig, P, only, sent
from quiesce.core.borrower import (
    Chunk,
    ChunkReady,
    Complete,
    DrainSaid,
    Fault,
    LenderGone,
    LenderUp,
    Outcome,
    PostEnded,
)
from quiesce.core.borrower import State as Borrowing
from quiesce.core.lender import NotRevoked, PeerLost, Publish, Revoked, Verified
from quiesce.core.lender import State as Lending
from quiesce.core.machine import Committed, Fired, Heard, Lost, Post, Stopped, Timer
from quiesce.core.messages import (
    Abort,
    Accept,
    Ack,
    Busy,
    Done,
    Drained,
    Failed,
    FirstToken,
    HandOff,
    Leg,
    NeverStarted,
    Ping,
    Refused,
    Sampling,
    Tainted,
    TransferId,
)
from quiesce.core.proofs import Proof
from quiesce.lab.cluster import Cluster
from quiesce.lab.lossy import Mischief
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_over

# ------------------------------------------------------------ the side that lends

End = Callable[[LenderRig, TransferId, Leg], object]
LENDER_ENDS: dict[str, End] = {
    "abort": lambda rig, tid, leg: rig.end(tid),
    "timeout": lambda rig, tid, leg: rig.fire(Timer.DEADLINE, tid),
    "failed": lambda rig, tid, leg: rig.hear(Failed(leg, "boom")),
    "peer lost": lambda rig, tid, leg: rig.lender.on(PeerLost(P, "died")),
    "finish": lambda rig, tid, leg: (rig.hear(rig.done(leg)), rig.end(tid, "stop")),
}
SPOKEN: dict[str, Callable[[LenderRig, Leg], HandOff]] = {
    "accept": lambda rig, leg: Accept(leg, 0),
    "done": lambda rig, leg: Done(leg, PAGES, TOKENS, None, FirstToken(11)),
    "done of another size": lambda rig, leg: Done(leg, 1, 1, None, FirstToken(11)),
    "failed": lambda rig, leg: Failed(leg, "late"),
    "refused: wrong epoch": lambda rig, leg: Refused(leg, "wrong epoch"),
    "refused: closed": lambda rig, leg: Refused(leg, "closed"),
    "refused: ended": lambda rig, leg: Refused(leg, "ended"),
    "refused: full": lambda rig, leg: Refused(leg, "full"),
    "refused: unknown epoch": lambda rig, leg: Refused(leg, "unknown epoch"),
    "drained": lambda rig, leg: Drained(leg),
    "never started": lambda rig, leg: NeverStarted(leg),
    "busy": lambda rig, leg: Busy(leg, 1),
    "tainted": lambda rig, leg: Tainted(leg),
}
LOCAL: dict[str, Callable[[TransferId], object]] = {
    "repeat timer": lambda tid: Fired(Timer.REPEAT, tid, 0),
    "deadline timer": lambda tid: Fired(Timer.DEADLINE, tid, 0),
    "hold timer": lambda tid: Fired(Timer.HOLD, tid, 0),
    "refence timer": lambda tid: Fired(Timer.REFENCE, tid, 0),
    "digest matches": lambda tid: Verified(tid, True),
    "digest differs": lambda tid: Verified(tid, False, frozenset({P})),
    "published again": lambda tid: Publish(tid, 0, 0, GENERATION, 1000),
    "peer lost": lambda tid: PeerLost(P, "died"),
    "fenced": lambda tid: Revoked(Proof.fenced(P, GENERATION)),
    "not fenced": lambda tid: NotRevoked(P, GENERATION),
}


@pytest.mark.parametrize("proven", [False, True], ids=["held", "closed"])
@pytest.mark.parametrize("late", [*SPOKEN, *(f"local: {name}" for name in LOCAL)])
@pytest.mark.parametrize("cause", LENDER_ENDS)
def test_scenario_j3_lender_takes_any_late_event_after_any_end(cause: str, late: str, proven: bool) -> None:
    rig = LenderRig()
    tid = rig.offered()
    leg = rig.leg(tid)
    other = rig.offered({0: P1})  # somebody else's, of another prefill engine
    LENDER_ENDS[cause](rig, tid, leg)
    if proven:
        rig.hear(Drained(leg))
        assert rig.state(tid) is None
    successor = rig.offered({0: P1}) if proven or cause == "finish" else None  # may have the very same pages
    for _ in range(2):
        event = LOCAL[late[7:]](tid) if late.startswith("local: ") else Heard(SPOKEN[late](rig, leg), P)
        actions = rig.lender.on(event)  # type: ignore[arg-type]
        assert only(actions, Committed) == [], "what has ended never commits"
        assert only(actions, Lost) == [], "its request was told already"
        if late in ("done", "failed"):
            assert sent(actions, Ack) == [Ack(leg)], "whoever repeats must be able to stop"
    for living in (other, successor):
        if living is not None:
            assert rig.state(living) is Lending.OFFERED and rig.kept(living)
            rig.hear(rig.done(rig.leg(living)))
            assert rig.state(living) is Lending.COMMITTED
            rig.end(living, "stop")
    if rig.state(tid) is not None:
        rig.lender.on(Revoked(Proof.fenced(P, GENERATION)))
        rig.hear(Drained(leg))
    assert rig.all_free()


# ------------------------------------------------------------ the side that posts

BORROWER_ENDS = ("abort", "fault", "done", "closed set", "lender gone", "post failed")
LATE: dict[str, Callable[[Leg, int], object]] = {
    "offer": lambda leg, post: "offer",
    "abort": lambda leg, post: Heard(Abort(leg, "late"), D),
    "ack": lambda leg, post: Heard(Ack(leg), D),
    "placed": lambda leg, post: PostEnded(leg, post, Outcome.PLACED),
    "failed clean": lambda leg, post: PostEnded(leg, post, Outcome.FAILED_CLEAN),
    "unknown": lambda leg, post: PostEnded(leg, post, Outcome.UNKNOWN),
    "placed, never posted": lambda leg, post: PostEnded(leg, 999, Outcome.PLACED),
    "chunk": lambda leg, post: ChunkReady(leg, Chunk((0,), 1)),
    "complete": lambda leg, post: Complete(leg, TOKENS, FirstToken(11)),
    "fault": lambda leg, post: Fault(leg, "late"),
    "drain proven": lambda leg, post: DrainSaid(leg, True),
    "drain not proven": lambda leg, post: DrainSaid(leg, False),
    "repeat timer": lambda leg, post: Fired(Timer.REPEAT, leg, 0),
    "old closed set": lambda leg, post: Heard(Ping(D, 0, 0, 0, 99, []), D),
    "lender up": lambda leg, post: LenderUp(D),
    "lender gone": lambda leg, post: LenderGone(D),
}


@pytest.mark.parametrize("flying", [True, False], ids=["a post under way", "nothing under way"])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("cause", BORROWER_ENDS)
def test_scenario_j3_borrower_takes_any_late_event_after_any_end(cause: str, late: str, flying: bool) -> None:
    if cause == "done":
        rig, flying = BorrowerRig(), False
        leg = rig.finished(1)
        number = 1
    else:
        rig = BorrowerRig()
        leg, posts = rig.posting(1, posts=2)
        number = posts[0].number
        if not flying or cause == "post failed":
            rig.ended(posts[0], Outcome.FAILED_CLEAN if cause == "post failed" else Outcome.PLACED)
        if not flying:
            rig.ended(posts[1])
        end(rig, leg, cause)
    outstanding = {post.number for post in posts} - {number} if cause == "post failed" and flying else set()
    if flying and cause != "post failed":
        outstanding = {post.number for post in posts}
    for _ in range(2):
        event = LATE[late](leg, number)
        actions = rig.offer(leg) if event == "offer" else rig.borrower.on(event)  # type: ignore[arg-type]
        if isinstance(event, PostEnded):
            outstanding.discard(event.number)
        assert only(actions, Post) == [], "an ended transfer posts nothing"
        assert only(actions, Stopped) == [], "its request was told already"
        record = rig.borrower.record(leg)
        assert record is None or record.posts == outstanding, "a post counts once, until it ends"
        if outstanding:
            assert not sent(actions, Drained), "nobody says DRAINED while a post is under way"
            assert rig.ledger.knows(leg.tid), "its source pages are lent to the post"
    for post in sorted(outstanding):
        rig.borrower.on(PostEnded(leg, post, Outcome.PLACED))
    rig.borrower.on(LenderGone(D))
    assert rig.borrower.known == 0
    census = rig.ledger.census()
    assert (census.free, census.rows_free) == (census.total, census.rows_total)


def end(rig: BorrowerRig, leg: Leg, cause: str) -> None:
    if cause == "abort":
        rig.abort(leg)
    elif cause == "fault":
        rig.borrower.on(Fault(leg, "boom"))
    elif cause == "closed set":
        rig.closed_set(leg.tid.seq)
    elif cause == "lender gone":
        rig.borrower.on(LenderGone(D))
    record = rig.borrower.record(leg)
    assert record is None or record.state is not Borrowing.OPEN


# ------------------------------------------------------------ real workers

NTH = range(1, 37)
MISCHIEF = tuple(
    Mischief(kind, "delay" if number % 2 else "duplicate", number, 0.6)
    for kind in ("Accept", "Done", "Failed", "Drained", "Busy", "Tainted", "Offer", "Abort", "Ack")
    for number in NTH
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_scenario_j3_real_workers_take_late_and_doubled_messages_after_every_end(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    """Answers come late or twice while requests end by abort, timeout, a failed transfer and by themselves."""
    pair = ("prefill-0", "decode-0")
    prompts = [[8 + (seed * 37 + position * 11) % 480 for position in range(70)] for seed in range(8)]
    right = oracle(prompts)
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 16, "context_length": 128}
    with Cluster(tiny, run_dir, hold_timeout=3.0, max_total_tokens=1024, max_retained=1.0, **sizes) as cluster:
        cluster.spawn("prefill", pair[0], Faults(ms_per_page=(5, 15), fail=0.15, mischief=MISCHIEF))
        cluster.spawn("decode", pair[1], Faults(mischief=MISCHIEF))
        cluster.wait_for(*pair)
        before = {name: cluster.inspect(name)["epoch"] for name in pair}
        requests = []
        for number in range(48):
            deadline = 0.15 if number % 4 == 1 else 30.0
            sampling = Sampling(max_tokens=12, ignore_eos=True)
            request = cluster.start(prompts[number % 8], sampling, pair, deadline=deadline)
            requests.append(request)
            if number % 4 == 2:
                at = request.started + 0.01 * (number % 12)
                cluster.until(lambda at=at: time.monotonic() >= at, 5, "the moment of the abort")
                cluster.cancel(request)
            if number % 6 == 5:
                until_over(cluster, requests, 30)
        until_over(cluster, requests, 30)
        for number, request in enumerate(requests):
            assert [len(ends) for ends in request.ends.values()] == [1, 1]
            assert request.tokens == right[number % 8][: len(request.tokens)]
            assert request.outcome != "length" or len(request.tokens) == 12
        assert {request.outcome for request in requests} == {"length", "failed", "cancelled"}
        for name in pair:
            check_idle(cluster, name, seconds=30)
            state = cluster.inspect(name)
            assert state["epoch"] == before[name] and state["stale"] > 0, "counted and ignored"
