"""Answers that sit: whatever joins, leaves, is aborted or retracted in whatever order, each step is what a plain
reckoning of every request says, and no page of a step under way comes back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.core.ledger import Change, Ledger
from quiesce.core.messages import Control, Drawn, Ended, Sampling, Start, TokenLogprob, Tokens, TransferId
from quiesce.core.pages import PagePool
from quiesce.engine.batch import Row
from quiesce.engine.engine import Result
from quiesce.engine.sampler import Sampled
from quiesce.engine.seats import Seats
from quiesce.roles.engine_thread import StepEnd
from quiesce.roles.generation import Generation, Owner
from quiesce.roles.legs import Legs, WorkerLeg
from quiesce.roles.running import Hearers, Running
from quiesce.roles.sequence import Batch, Outcome, Sequence
from quiesce.roles.steps import Listeners, Steps

SIZE, PAGES, MOST, CHUNK = 2, 14, 5, 3
EOS = frozenset({7})


def token_at(salt: int, position: int) -> int:
    return (salt * 31 + position * position * 7 + position // 3) % 11


@dataclass(frozen=True)
class Asked:
    prompt: int
    sampling: Sampling
    priority: int

    def answer(self, salt: int) -> list[int]:
        """As it must be: a token a position, until one ends it or there are enough."""
        tokens: list[int] = []
        while len(tokens) < self.sampling.max_tokens:
            tokens.append(token_at(salt, self.prompt + len(tokens)))
            if self.ends(tokens[-1]):
                break
        return tokens

    def ends(self, token: int) -> bool:
        return token in self.sampling.stop_token_ids or (token in EOS and not self.sampling.ignore_eos)


@dataclass
class Engine:
    """In the thread's place: looks at all that a step would read, and draws by position."""

    loop: Loop
    busy: bool = False
    steps: int = 0
    work: tuple[list[Row], Seats | None, list[Sequence]] | None = None
    done: deque[StepEnd] = field(default_factory=deque)

    def submit(self, rows: list[Row], seats: Seats | None = None) -> None:
        assert not self.busy
        whose = [s for s, _ in self.loop.batch.under_way] + (self.loop.running.sequences if seats else [])
        everything = rows + (seats.rows() if seats else [])
        assert len(whose) == len(everything) > 0
        assert len({s.tid for s in whose}) == len(whose)
        for row, sequence in zip(everything, whose, strict=True):
            known = self.loop.known(sequence)
            assert list(row.tokens) == known[row.start : row.end] and row.tokens
            assert row.start == sequence.computed and list(row.history) == known
            assert list(row.pages) == list(self.loop.ledger.pages(sequence.tid)) == list(sequence.pages)
            for page in row.pages[row.start // SIZE : -(-row.end // SIZE)]:
                assert self.loop.ledger.writers(page) == [sequence.lease]
        self.busy, self.work = True, (rows, seats, list(whose))

    def end(self, broken: int | None) -> None:
        """`broken`: the row of that number, of all, cannot be computed."""
        assert self.work is not None
        rows, seats, whose = self.work
        assert all(self.loop.ledger.has(sequence.lease) for sequence in whose)  # its pages are nobody else's yet
        drawn: list[int] = []
        for row, sequence in zip(rows + (seats.rows() if seats else []), whose, strict=True):
            drawn.append(token_at(self.loop.salts[sequence.rid], row.end) if row.sample else -1)
        plain = len(rows)
        wish = [row.sample.logprobs if row.sample else None for row in rows]
        results = [
            Result(Sampled(t, None if w is None else TokenLogprob(-1.0)) if row.sample else None)
            for row, t, w in zip(rows, drawn, wish, strict=False)
        ]
        end = StepEnd(results, tokens=np.array(drawn[plain:], np.int64) if seats else None)
        if broken is not None and broken < len(whose):
            (end.errors if broken < plain else end.seat_errors)[broken - (plain if broken >= plain else 0)] = (
                RuntimeError("broken")
            )
        self.done.append(end)

    def take(self) -> StepEnd | None:
        if not self.done:
            return None
        self.busy, self.work = False, None
        self.steps += 1
        return self.done.popleft()


class Loop:
    """A worker's loop without its sockets."""

    def __init__(self) -> None:
        self.ledger = Ledger(PagePool(PAGES), PagePool(4 * MOST, "rows"))
        self.batch = Batch(MOST, CHUNK)
        self.legs = Legs(self)
        self.engine = Engine(self)
        thread: Any = self.engine
        owner = Owner(self._finished, self._own, self._release, lambda *_: None)
        self.generation = Generation(
            self.ledger, self.batch, self.legs, page_size=SIZE, eos=EOS, owner=owner, conservativeness=0.0
        )
        listeners = Listeners(self.generation.computed, self._failed, self.generation.retract)
        self.steps = Steps(thread, self.batch, self.ledger, SIZE, listeners)
        hearers = Hearers(self.generation.streamed, self.generation.finished)
        self.running = Running(self.ledger, MOST, SIZE, hearers)
        self.steps.run_in(self.running)
        self.minted = 0
        self.asked: dict[str, Asked] = {}
        self.salts: dict[str, int] = {}
        self.routers: dict[str, bytes] = {}
        self.heard: dict[str, list[int]] = {}
        self.over: dict[str, Ended] = {}
        self.waiting: list[WorkerLeg] = []

    def send(self, to: bytes, message: Control) -> bool:
        match message:
            case Tokens(rid=rid, token_ids=tokens):
                pairs = [(rid, token) for token in tokens]
            case Drawn(rids=rids, token_ids=tokens):
                pairs = list(zip(rids, tokens, strict=True))
            case Ended(rid=rid):
                assert rid not in self.over
                self.over[rid] = message
                return True
            case _:
                raise AssertionError(message)
        for rid, token in pairs:
            assert rid not in self.over and self.routers[rid] == to
            self.heard[rid].append(token)
        return True

    def known(self, sequence: Sequence) -> list[int]:
        return [1] * self.asked[sequence.rid].prompt + self.heard[sequence.rid]

    def ask(self, asked: Asked, router: bytes) -> None:
        number = len(self.asked)
        rid = f"r{number}"
        self.asked[rid], self.salts[rid], self.heard[rid] = asked, number * 17 + 3, []
        start = Start(rid, 1, number, (1,) * asked.prompt, asked.sampling, 1000, priority=asked.priority)
        self.routers[rid] = router
        leg = WorkerLeg(start, router, float(number))
        self.legs.open(leg)
        self.waiting.append(leg)

    def _own(self, pages: int) -> TransferId | None:
        tid = TransferId(1, self.minted + 1)
        if self.ledger.own(tid, pages) is None:
            return None
        self.minted += 1
        return tid

    def _release(self, tid: TransferId, reason: str) -> None:
        self.ledger.end(tid)

    def _finished(self, leg: WorkerLeg, outcome: Outcome) -> None:
        self._last_word(leg, outcome)
        self._leave(leg)

    def _last_word(self, leg: WorkerLeg, outcome: Any) -> None:
        self.legs.end(leg, Ended(leg.rid, outcome, completion_tokens=leg.generated))

    def _leave(self, leg: WorkerLeg) -> None:
        tid = self.generation.tids[leg.rid]
        self.generation.leave(tid)
        self.ledger.end(tid)

    def _failed(self, sequence: Sequence, error: Exception) -> None:
        leg = self.generation.by_tid[sequence.tid]
        self._last_word(leg, "failed")
        self._leave(leg)

    def abort(self, leg: WorkerLeg) -> None:
        self._last_word(leg, "cancelled")
        if leg.rid in self.generation.tids:
            self._leave(leg)
        elif not self.generation.forget(leg):
            self.waiting.remove(leg)

    def turn(self) -> None:
        self.legs.gather()
        try:
            self.steps.collect()
        finally:
            self.legs.send()
        self.generation.resume()
        for leg in list(self.waiting):
            tid = None if not self.generation.fits(leg) else self._own(-(-leg.prompt_tokens // SIZE))
            if tid is not None:
                self.waiting.remove(leg)
                self.generation.admit(leg, tid)
                self.generation.sequence(tid, computed=0)
        self.steps.launch()
        self.look()

    def look(self) -> None:
        """What is kept in several places is the same everywhere."""
        assert [s.seat for s in self.running.sequences] == list(range(len(self.running)))
        assert len(self.running.seats) == len(self.running)
        seated = {s.tid for s in self.running.sequences if not s.ended}
        assert self.batch.members.keys() == seated | self.batch.standing.keys()
        assert not seated & self.batch.standing.keys()
        for sequence in self.running.sequences:
            assert self.ledger.has(sequence.lease)
        for lease in self.ledger.open_leases():
            running = self.running.sequences + [s for s, _ in self.batch.under_way]
            assert lease.key in {s.lease for s in running}


WISHES = st.builds(
    Sampling,
    max_tokens=st.integers(1, 12),
    stop_token_ids=st.lists(st.integers(0, 10), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, None, 0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.2]),
)
ASKED = st.builds(Asked, st.integers(1, 7), WISHES, st.integers(0, 1))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), ASKED, st.sampled_from([b"a", b"b"])),
        st.tuples(st.just("turn")),
        st.tuples(st.just("end"), st.one_of(st.none(), st.none(), st.none(), st.integers(0, 4))),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("retract"), st.integers(0, 9)),
    ),
    max_size=80,
)


def happen(loop: Loop, event: Any) -> None:
    match event:
        case "ask", asked, router:
            loop.ask(asked, router)
        case ("turn",):
            loop.turn()
        case "end", broken:
            if loop.engine.busy and not loop.engine.done:
                loop.engine.end(broken)
                loop.turn()
        case "abort", number:
            if legs := list(loop.legs.by_rid.values()):
                loop.abort(legs[number % len(legs)])
                loop.look()
        case "retract", number:  # in the middle of a step, too
            if members := list(loop.batch.members.values()):
                loop.generation.retract(members[number % len(members)])
                loop.look()


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_any_order_of_joining_and_leaving_gives_each_request_its_own_tokens(events: list[Any]) -> None:
    loop = Loop()
    for event in events:
        happen(loop, event)
    turns = 0
    while loop.legs.by_rid:
        happen(loop, ("end", None) if loop.engine.busy else ("turn",))
        assert (turns := turns + 1) < 2000
    happen(loop, ("end", None))
    loop.turn()
    for rid, asked in loop.asked.items():
        due, end = asked.answer(loop.salts[rid]), loop.over[rid]
        assert loop.heard[rid] == due[: len(loop.heard[rid])] and end.completion_tokens == len(loop.heard[rid])
        if end.outcome in ("stop", "length"):
            assert loop.heard[rid] == due
            assert (end.outcome == "stop") == asked.ends(due[-1])
    assert loop.ledger.not_idle() == [] and loop.ledger.stale == 0
    assert loop.ledger.opened == loop.ledger.steps


def test_pages_taken_ahead_leave_half_of_what_is_free_if_everyone_takes_as_many() -> None:
    loop, taken = Loop(), list[int]()

    def hear(change: Change) -> None:
        if change.event == "grown":
            count, free = len(change.pages), loop.ledger.pool.free
            assert count == 1 or 2 * len(loop.batch) * count <= free + count
            taken.append(count)

    loop.ledger.observe = hear
    for _ in range(2):
        loop.ask(Asked(1, Sampling(max_tokens=12, ignore_eos=True), 0), b"a")
    while loop.legs.by_rid:
        happen(loop, ("end", None) if loop.engine.busy else ("turn",))
    assert sum(taken) == 10  # six pages each, and not one that no token went to; the first came with the prompt
    assert max(taken) > 1 and taken[-1] == 1
