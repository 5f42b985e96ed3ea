"""The wire: every message survives it, nothing that comes over it raises."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.core import messages
from quiesce.core.codec import Codec
from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import FirstToken, Grant, Leg, Sample, TokenLogprob, TransferId, Wire

KINDS = typing.get_args(Wire)
u64 = st.integers(0, 2**64 - 1)
small = st.integers(0, 2**31)
text = st.text(max_size=12)


def strategy_of(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of one wire type, from its annotations."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    simple = {
        int: u64,
        float: st.floats(allow_nan=False),
        str: text,
        bytes: st.binary(max_size=12),
        bool: st.booleans(),
    }
    if kind in simple:
        return simple[kind]
    if kind is type(None):
        return st.none()
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(strategy_of, arguments))
    if origin is list:
        return st.lists(strategy_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(text, st.one_of(small, text, st.none(), st.lists(small, max_size=2)), max_size=3)
    if arguments:
        return st.one_of(*map(strategy_of, arguments))
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: strategy_of(hints[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type):
    @settings(max_examples=15, deadline=None)
    @given(strategy_of(kind))
    def round_trip(message: Wire) -> None:
        codec = Codec()
        back = codec.decode(codec.encode(message))
        assert back == message and type(back) is kind
        assert codec.malformed == 0

    round_trip()


def test_the_table_of_messages_is_complete():
    defined = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    assert defined == set(KINDS)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_never_raise(frame: bytes):
    codec = Codec()
    message = codec.decode(frame)
    assert (message is None) == (codec.malformed == 1)


SAMPLES: list[Wire] = [
    messages.Offer(Leg(TransferId(1, 2), 0, 0, 3), 4, b"p", Grant(0, 1, (1, 2, 3)), 40, 0, 1000),
    messages.Done(Leg(TransferId(1, 2), 0, 0, 3), 3, 40, b"d", FirstToken(7, 1, TokenLogprob(-0.5, ((1, -0.1),)))),
    messages.Hello(1, 0, 2, 1, 1, Fingerprint("m", "w", "d", "l", 16, 1, 1, 1, 1), b"secret"),
    messages.Inspected(1, [Sample("n", "counter", "h", (("a", "b"),), 1.0)], {"a": [1, {"b": None}]}),
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), small)
def test_damaged_messages_never_raise(message: Wire, damage: list[tuple[int, int]], cut: int):
    codec = Codec()
    frame = bytearray(codec.encode(message))
    for position, value in damage:
        frame[position % len(frame)] = value
    for frame_or_part in (bytes(frame), bytes(frame[: cut % len(frame)]), bytes(frame) + b"\x00"):
        codec.decode(frame_or_part)


@pytest.mark.parametrize(
    "value",
    [
        [],
        ["Abort"],
        ["NoSuchMessage", 1],
        ["Abort", [[1, 2], 0, 0, 3], 5],
        ["Abort", [[1, 2], 0, 0, 3], "reason", "one too many"],
        ["Abort", [[1, 2], 0, 0], "reason"],
        ["Drained", None],
        {"type": "Drained"},
        "Drained",
    ],
)
def test_what_is_no_message_is_counted(value: typing.Any):
    codec = Codec()
    assert codec.decode(msgspec.msgpack.encode(value)) is None
    assert codec.malformed == 1


def test_deep_nesting_is_counted_and_not_fatal():
    codec = Codec()
    assert codec.decode(b"\x91" * 100_000) is None
    state = b"\x81\xa1a" * 50_000 + b"\xc0"
    assert codec.decode(b"\x94" + msgspec.msgpack.encode("Inspected") + b"\x01\x90" + state) is None
    assert codec.malformed == 2


def test_oversized_frames_are_refused_in_both_directions():
    codec = Codec()
    assert codec.decode(bytes(Codec.MAX_BYTES + 1)) is None and codec.malformed == 1
    leg = Leg(TransferId(1, 2), 0, 0, 3)
    with pytest.raises(ValueError, match="Failed of"):
        codec.encode(messages.Failed(leg, "x" * Codec.MAX_BYTES))
