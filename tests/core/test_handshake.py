"""An epoch is taken only after the echo of an own, still open challenge (guard A14; story 20)."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Confirm, Hello, Unwelcome, Welcome
from quiesce.core.session import Handshake

PRINT = Fingerprint("m", "w", "bfloat16", "page-major/row", 16, 4096, 2, 2, 64)
draws = itertools.count(1)


def side(epoch: int, fingerprint: Fingerprint = PRINT) -> Handshake:
    return Handshake(epoch, 0, fingerprint, lambda: next(draws))


def welcome_to(prefill: Handshake, hello: Hello) -> Welcome:
    answer = prefill.on_hello(hello)
    assert isinstance(answer, Welcome)
    return answer


def test_both_sides_take_each_other():
    decode, prefill = side(1), side(2)
    confirm = decode.on_welcome(welcome_to(prefill, decode.hello(b"")))
    assert prefill.peer is None, "a HELLO alone is not enough"
    assert confirm is not None and prefill.on_confirm(confirm)
    assert (decode.peer, prefill.peer, decode.version, prefill.version) == (2, 1, 1, 1)


def test_a14_a_late_hello_of_an_old_epoch_never_wins():
    old, new, prefill = side(1), side(3), side(2)
    late = old.hello(b"")
    stale = old.on_welcome(welcome_to(prefill, old.hello(b"")))
    assert stale is not None
    confirm = new.on_welcome(welcome_to(prefill, new.hello(b"")))
    assert confirm is not None and prefill.on_confirm(confirm) and prefill.peer == 3
    welcome_to(prefill, late)  # the dead process cannot answer this challenge
    assert not prefill.on_confirm(stale) and prefill.peer == 3


def test_a14_a_challenge_is_used_once():
    decode, prefill = side(1), side(2)
    welcome = welcome_to(prefill, decode.hello(b""))
    confirm = decode.on_welcome(welcome)
    assert confirm is not None and prefill.on_confirm(confirm)
    assert not prefill.on_confirm(confirm) and decode.on_welcome(welcome) is None


def test_a14_a_new_hello_replaces_the_old_one():
    decode, prefill = side(1), side(2)
    first, second = decode.hello(b""), decode.hello(b"")
    assert decode.on_welcome(welcome_to(prefill, first)) is None and decode.peer is None
    late = welcome_to(prefill, first)
    assert decode.on_welcome(welcome_to(prefill, second)) is not None
    assert decode.on_welcome(late) is None


def test_a14_taking_an_epoch_cancels_every_other_open_challenge():
    one, two, prefill = side(1), side(3), side(2)
    first = one.on_welcome(welcome_to(prefill, one.hello(b"")))
    second = two.on_welcome(welcome_to(prefill, two.hello(b"")))
    assert first is not None and second is not None
    assert not prefill.on_confirm(first), "its challenge was replaced"
    assert prefill.on_confirm(second) and not prefill.on_confirm(first)


def test_a_confirm_counts_only_from_the_epoch_that_was_challenged():
    decode, prefill = side(1), side(2)
    confirm = decode.on_welcome(welcome_to(prefill, decode.hello(b"")))
    assert confirm is not None
    assert not prefill.on_confirm(Confirm(9, 0, confirm.echo)) and prefill.peer is None
    assert prefill.on_confirm(confirm)


def test_a_different_layout_is_refused_by_the_name_of_the_field():
    decode, prefill = side(1), side(2, Fingerprint("m", "w", "float32", "page-major/row", 16, 4096, 2, 2, 64))
    answer = prefill.on_hello(decode.hello(b""))
    assert isinstance(answer, Unwelcome) and "dtype" in answer.reason and prefill.peer is None


def test_the_other_direction_is_refused_by_the_name_of_the_field():
    push, pull = side(1), side(2, Fingerprint("m", "w", "bfloat16", "page-major/row", 16, 4096, 2, 2, 64, 1, "pull"))
    answer = pull.on_hello(push.hello(b""))
    assert isinstance(answer, Unwelcome) and "direction: 'pull' != 'push'" in answer.reason and pull.peer is None


def test_a_fingerprint_without_a_direction_is_of_a_version_that_only_pushes():
    plain = {field: getattr(PRINT, field) for field in PRINT.__struct_fields__ if field != "direction"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Fingerprint) == PRINT


def test_a_version_that_does_not_overlap_is_refused():
    answer = side(2).on_hello(Hello(1, 0, 5, 90, 99, PRINT, b""))
    assert isinstance(answer, Unwelcome) and "version" in answer.reason


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=4, max_size=60))
def test_a14_no_order_of_old_messages_brings_a_dead_epoch_back(picks: list[int]):
    """Two lender processes, one after the other; every message may come late, twice, in any order. Only what the
    network holds at the second one's start is left of the first."""
    prefill, old, new = side(2), side(1), side(3)
    wire: list[Hello | Welcome | Confirm] = [old.hello(b""), old.hello(b"")]
    alive, taken_new = old, False
    for step, pick in enumerate(picks):
        if step == len(picks) // 3:
            alive = new
        if pick % 5 == 0:
            wire.append(alive.hello(b""))
        message = wire[pick % len(wire)]
        answer: Hello | Welcome | Confirm | Unwelcome | None = None
        if isinstance(message, Hello):
            answer = prefill.on_hello(message)
        elif isinstance(message, Welcome):
            answer = alive.on_welcome(message)
        else:
            prefill.on_confirm(message)
        if answer is not None and not isinstance(answer, Unwelcome):
            wire.append(answer)
        taken_new = taken_new or prefill.peer == 3
        assert not (taken_new and prefill.peer == 1), "a dead epoch won"
