"""Last words reach a router that is slow, and are not kept for one that is gone."""

from __future__ import annotations

from quiesce.core.codec import Codec
from quiesce.core.messages import Control, Drawn, Ended, PromptLogprobs, Sampling, Start, TokenLogprob, Tokens
from quiesce.engine.sampler import Sampled
from quiesce.roles.legs import LAST_WORDS_SECONDS, OUTBOX_LIMIT, Legs, WorkerLeg

ROUTER = b"r"


class Queue:
    """A socket that takes `room` messages."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[Control] = []

    def send(self, to: bytes, message: Control) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.taken.append(message)
        return True


def running(legs: Legs, number: int = 0) -> WorkerLeg:
    start = Start(f"rid{number}", 7, 100 + number, (1, 2), Sampling(max_tokens=4), 1000)
    leg = WorkerLeg(start, ROUTER, 0.0)
    legs.open(leg)
    return leg


def test_r1_last_word_waits_for_a_router_that_is_slow() -> None:
    queue = Queue(room=1)
    legs = Legs(queue)
    leg = running(legs)
    for token in range(3):
        legs.tokens(leg, Sampled(token))
    assert legs.end(leg, Ended(leg.rid, "length"))
    assert legs.flush(0.0) == [] and legs.flush(LAST_WORDS_SECONDS - 1) == []
    queue.room = 10
    assert legs.flush(LAST_WORDS_SECONDS) == []
    assert queue.taken == [*(Tokens(leg.rid, (token,)) for token in range(3)), Ended(leg.rid, "length")]
    assert not legs.outbox


def test_last_words_to_a_router_that_is_gone_are_dropped_in_the_end() -> None:
    legs = Legs(Queue(room=0))
    leg = running(legs)
    legs.end(leg, Ended(leg.rid, "cancelled"))
    legs.flush(0.0)
    assert legs.outbox
    assert legs.flush(LAST_WORDS_SECONDS + 1) == []
    assert not legs.outbox


def test_a_router_too_far_behind_loses_its_legs() -> None:
    legs = Legs(Queue(room=0))
    leg = running(legs)
    for token in range(OUTBOX_LIMIT + 1):
        legs.tokens(leg, Sampled(token))
    assert legs.flush(0.0) == [ROUTER]
    assert legs.of(ROUTER) == [leg] and not legs.outbox


def test_nothing_is_kept_for_a_router_that_is_known_to_be_dead() -> None:
    legs = Legs(Queue(room=0))
    leg = running(legs)
    legs.end(leg, Ended(leg.rid, "cancelled"))
    legs.drop(ROUTER)
    assert not legs.outbox


def test_a_long_chunk_s_log_probabilities_go_in_pieces_that_a_message_can_carry() -> None:
    """54,000 tokens with 20 alternatives each would be one message that can never be sent."""
    queue = Queue(room=1000)
    legs = Legs(queue)
    tokens = 60_000
    start = Start("rid", 7, 1, (1,) * tokens, Sampling(max_tokens=1, prompt_logprobs=20), 1000)
    leg = WorkerLeg(start, ROUTER, 0.0)
    legs.open(leg)
    one = TokenLogprob(-1.0, tuple((1 << 20, -1.5) for _ in range(20)))
    legs.prompt_logprobs(leg, tokens, (one,) * (tokens - 1))
    told: list[TokenLogprob | None] = []
    for message in queue.taken:
        assert isinstance(message, PromptLogprobs) and message.first == len(told)
        assert len(Codec().encode(message)) < Codec.MAX_BYTES / 8
        told += message.logprobs
    assert told == [None, *[one] * (tokens - 1)]


def test_what_a_step_drew_goes_in_one_message_and_before_any_last_word() -> None:
    queue = Queue(room=100)
    legs = Legs(queue)
    first, second, third = (running(legs, number) for number in range(3))
    legs.gather()
    legs.tokens(first, Sampled(5))
    legs.tokens(second, Sampled(6))
    legs.end(second, Ended(second.rid, "length"))
    legs.tokens(third, Sampled(7))
    legs.send()
    assert queue.taken == [
        Drawn((first.rid, second.rid), (5, 6)),
        Ended(second.rid, "length"),
        Tokens(third.rid, (7,)),
    ]
    legs.tokens(first, Sampled(8))  # between steps: at once
    assert queue.taken[-1] == Tokens(first.rid, (8,))
    assert legs.sent == 4


def test_a_token_with_its_log_probability_keeps_its_place_among_those_that_go_together() -> None:
    queue = Queue(room=100)
    legs = Legs(queue)
    plain, scored = running(legs, 0), running(legs, 1)
    legs.gather()
    legs.tokens(plain, Sampled(5))
    legs.tokens(scored, Sampled(6, TokenLogprob(-1.0)))
    legs.send()
    assert queue.taken == [Tokens(plain.rid, (5,)), Tokens(scored.rid, (6,), (TokenLogprob(-1.0),))]
