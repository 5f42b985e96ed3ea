"""The request machine: pure, so every order of events can be tried."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.core.messages import Ended, TokenLogprob
from quiesce.router.request import (
    CANCEL_TRIES,
    Arm,
    Begin,
    Blame,
    Credit,
    Emit,
    EmitPrompt,
    Event,
    Finish,
    Fired,
    Forget,
    GaveUp,
    LegClosed,
    LegEnded,
    LegLost,
    LegPrompt,
    LegState,
    LegTokens,
    NotSent,
    RequestMachine,
    Satisfied,
    SendCancel,
    SendStart,
    Sent,
)

GONE = GaveUp(499, "the client closed its connection", "client_gone")


def ended(side: str, outcome: str, status: int = 200, tokens: int = 0, reason: str = "") -> LegEnded:
    return LegEnded(side, Ended("r", outcome, status, reason, 3, tokens))


def started(sides: tuple[Any, ...] = ("decode", "prefill")) -> RequestMachine:
    machine = RequestMachine(sides)
    assert machine.on(Begin()) == [SendStart("decode")]
    follow = machine.on(Sent("decode"))
    if "prefill" in sides:
        assert follow == [SendStart("prefill")]
        assert machine.on(Sent("prefill")) == []
    return machine


def error_of(actions: list[Any]) -> tuple[int, str | None]:
    (finish,) = [action for action in actions if isinstance(action, Finish)]
    assert finish.verdict.error is not None
    return finish.verdict.error.status, finish.verdict.error.code


def cancelled(actions: list[Any]) -> set[str]:
    return {action.side for action in actions if isinstance(action, SendCancel)}


def test_a_good_request() -> None:
    machine = started()
    assert machine.on(ended("prefill", "handed_over")) == [Credit("prefill"), LegClosed("prefill")]
    assert machine.on(LegTokens("decode", (1, 2))) == [Emit((1, 2))]
    actions = machine.on(ended("decode", "length", tokens=2))
    assert actions[:2] == [Credit("decode"), LegClosed("decode")] and actions[-1] == Forget()
    assert actions[2].verdict.finish_reason == "length" and not cancelled(actions)


def test_r1_client_gone_cancels_both_legs_before_the_first_token() -> None:
    machine = started()
    actions = machine.on(GONE)
    assert cancelled(actions) == {"decode", "prefill"}
    assert machine.on(LegTokens("decode", (1,))) == [] and machine.late == 1
    assert machine.on(ended("decode", "cancelled")) == [LegClosed("decode")]
    assert machine.on(ended("prefill", "cancelled")) == [LegClosed("prefill"), Forget()]


def test_r2_prefill_failure_cancels_decode_with_the_status_of_the_failure() -> None:
    machine = started()
    actions = machine.on(ended("prefill", "refused", 503, reason="full"))
    assert error_of(actions) == (503, "prefill_refused")
    assert cancelled(actions) == {"decode"}


def test_r3_decode_failure_cancels_prefill() -> None:
    machine = started()
    actions = machine.on(ended("decode", "failed", 500))
    assert error_of(actions) == (500, "decode_failed")
    assert cancelled(actions) == {"prefill"}


def test_d1_nothing_is_sent_to_prefill_when_decode_cannot_be_reached() -> None:
    machine = RequestMachine()
    machine.on(Begin())
    actions = machine.on(NotSent("decode", "decode-0"))
    assert error_of(actions) == (503, "worker_unreachable")
    assert SendStart("prefill") not in actions and actions[-1] == Forget()


def test_a_start_that_reached_decode_only_is_taken_back() -> None:
    machine = RequestMachine()
    machine.on(Begin())
    machine.on(Sent("decode"))
    actions = machine.on(NotSent("prefill", "prefill-0"))
    assert error_of(actions)[0] == 503 and cancelled(actions) == {"decode"}


def test_the_first_cause_wins() -> None:
    machine = started()
    assert error_of(machine.on(ended("prefill", "failed", 500)))[0] == 500
    for event in (GONE, LegLost("decode", "died", dead=False), Satisfied()):
        assert not [action for action in machine.on(event) if isinstance(action, Finish)]


def test_the_last_words_of_prefill_do_not_matter_once_decode_speaks() -> None:
    for last in (LegLost("prefill", "died", dead=True), ended("prefill", "failed", 500)):
        machine = started()
        machine.on(LegTokens("decode", (1,)))
        assert machine.on(last) == [LegClosed("prefill")]
        assert machine.on(ended("decode", "stop", tokens=1))[2].verdict.finish_reason == "stop"


def judged(actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, Blame | Credit)]


def failed(side: str, status: int, fault: str = "", outcome: str = "failed") -> LegEnded:
    return LegEnded(side, Ended("r", outcome, status, "it broke", 3, 0, 0, fault))


def test_the_leg_that_is_at_fault_is_blamed_and_a_client_s_mistake_is_nobody_s() -> None:
    for event, blamed in (
        (failed("prefill", 500), [Blame("prefill")]),
        (failed("decode", 502, "peer"), [Blame("prefill")]),  # decode says that its prefill worker is gone
        (failed("decode", 503, "peer"), [Blame("prefill", sick=False)]),  # ... remembers as many transfers as it may
        (failed("decode", 502, "self"), [Blame("decode")]),
        (failed("decode", 502, "router"), []),  # the other leg came too late
        (failed("decode", 503, "", "refused"), [Blame("decode", sick=False)]),  # full, or draining
        (failed("prefill", 502, "", "cancelled"), []),  # because decode gave it up, which says why itself
        (failed("prefill", 400, "", "refused"), [Blame("prefill", sick=False)]),
        (LegLost("decode", "died", dead=True), [Blame("decode")]),
        (GaveUp(504, "late", "deadline_exceeded", late=True), [Blame("prefill")]),
        (GaveUp(504, "late", "deadline_exceeded"), []),  # the client's own deadline
        (GONE, []),
    ):
        assert judged(started().on(event)) == blamed, event


def test_only_what_another_worker_need_not_meet_is_worth_another_attempt() -> None:
    for event, again in (
        (failed("prefill", 502), True),
        (failed("decode", 502, "router"), True),
        (failed("decode", 503, "", "refused"), True),
        (LegLost("prefill", "died", dead=True), True),
        (failed("prefill", 500), False),  # the prompt may have broken the engine
        (failed("prefill", 400, "", "refused"), False),
        (failed("decode", 504), False),
        (GONE, False),
    ):
        (finish,) = [action for action in started().on(event) if isinstance(action, Finish)]
        assert finish.again is again, event


def test_an_unanswered_cancel_is_repeated_and_given_up_in_the_end() -> None:
    machine = started(("decode",))
    assert Arm("decode", 0) in machine.on(GONE)
    for tries in range(1, CANCEL_TRIES):
        assert machine.on(Fired("decode")) == [SendCancel("decode", GONE.reason), Arm("decode", tries)]
    assert machine.on(Fired("decode")) == [LegClosed("decode", answered=False), Forget()]


def test_missing_tokens_are_a_failure() -> None:
    machine = started(("decode",))
    machine.on(LegTokens("decode", (1,)))
    assert error_of(machine.on(ended("decode", "length", tokens=2))) == (500, "tokens_lost")


def test_the_verdict_waits_for_the_prompts_logprobs() -> None:
    machine = RequestMachine(logprobs=True, prompt_logprobs=3)
    for event in (Begin(), Sent("decode"), Sent("prefill")):
        machine.on(event)
    one = TokenLogprob(-1.0)
    assert machine.on(LegTokens("decode", (1,), (one,))) == [Emit((1,), (one,))]
    assert machine.on(ended("decode", "length", tokens=1)) == [Credit("decode"), LegClosed("decode")]
    assert machine.on(LegPrompt("decode", 0, (None,))) == [] and machine.late == 1  # not the side that computes it
    assert machine.on(LegPrompt("prefill", 0, (None, one))) == [EmitPrompt((None, one))]
    emitted, finish, *_ = machine.on(LegPrompt("prefill", 2, (one,)))
    assert emitted == EmitPrompt((one,)) and finish.verdict.finish_reason == "length"
    assert machine.on(ended("prefill", "handed_over")) == [Credit("prefill"), LegClosed("prefill"), Forget()]


def test_a_prefill_that_is_gone_with_logprobs_of_the_prompt_fails_the_answer() -> None:
    for last in (
        LegLost("prefill", "died", dead=True),
        ended("prefill", "failed", 500),
        ended("prefill", "handed_over"),
        LegPrompt("prefill", 1, (None,)),
        LegPrompt("prefill", 0, (None,) * 4),
    ):
        machine = RequestMachine(prompt_logprobs=3)
        for event in (Begin(), Sent("decode"), Sent("prefill"), LegTokens("decode", (1,))):
            machine.on(event)
        machine.on(ended("decode", "length", tokens=1))
        assert error_of(machine.on(last))[0] >= 500


SIDES = st.sampled_from(["decode", "prefill"])
OUTCOMES = st.sampled_from(["stop", "length", "handed_over", "cancelled", "refused", "failed"])
EVENTS = st.one_of(
    st.builds(LegTokens, SIDES, st.just((1,)), st.sampled_from([(), (TokenLogprob(-1.0),)])),
    st.builds(LegPrompt, SIDES, st.integers(0, 2), st.sampled_from([(None,), (None, None)])),
    st.builds(ended, SIDES, OUTCOMES, st.sampled_from([200, 400, 503, 7]), st.integers(0, 3)),
    st.builds(LegLost, SIDES, st.just("lost"), st.booleans()),
    st.just(GONE),
    st.just(GaveUp(504, "late", "deadline_exceeded")),
    st.just(Satisfied()),
    st.builds(Fired, SIDES),
)


@settings(max_examples=400, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=25),
    two=st.booleans(),
    reach=st.tuples(st.booleans(), st.booleans()),
    logprobs=st.booleans(),
    prompt=st.integers(0, 2),
)
def test_any_order_of_events_gives_one_verdict_and_ends_every_leg(
    events: list[Event], two: bool, reach: tuple[bool, bool], logprobs: bool, prompt: int
) -> None:
    sides: tuple[Any, ...] = ("decode", "prefill") if two else ("decode",)
    reached = dict(zip(("decode", "prefill"), reach, strict=True))
    machine = RequestMachine(sides, logprobs, prompt)
    seen: list[Any] = []
    armed: set[str] = set()

    def feed(event: Event) -> None:
        for action in machine.on(event):
            seen.append(action)
            if isinstance(action, SendStart):
                feed(Sent(action.side) if reached[action.side] else NotSent(action.side, "w"))
            if isinstance(action, Arm):
                armed.add(action.side)
            if isinstance(action, LegClosed):
                armed.discard(action.side)

    feed(Begin())
    for event in events:
        side = getattr(event, "side", "decode")
        if side in sides and not (isinstance(event, Fired) and side not in armed):
            feed(event)

    finishes = [i for i, action in enumerate(seen) if isinstance(action, Finish)]
    assert len(finishes) <= 1
    if finishes:
        if seen[finishes[0]].verdict.error is None:
            told = sum(len(action.logprobs) for action in seen if isinstance(action, EmitPrompt))
            assert told == prompt or Satisfied() in events
        assert not any(isinstance(action, Emit | EmitPrompt | SendStart) for action in seen[finishes[0] :])
        assert LegState.OPEN not in machine.legs.values()
        assert LegState.NEW not in machine.legs.values()
        waiting = {side for side, state in machine.legs.items() if state is LegState.ENDING}
        assert waiting == armed  # whatever is waited for has a clock
    else:
        feed(GONE)
    # Timers alone bring it to its end.
    for _ in range(CANCEL_TRIES * 2):
        for side in list(armed):
            feed(Fired(side))
    assert machine.closed
    assert [action for action in seen if isinstance(action, Forget)] == [Forget()]
    assert seen[-1] == Forget()
    assert sum(isinstance(action, Finish) for action in seen) == 1
    closed = [action.side for action in seen if isinstance(action, LegClosed)]
    assert sorted(closed) == sorted(sides)
    starts = [action.side for action in seen if isinstance(action, SendStart)]
    assert len(starts) == len(set(starts))  # never retried
