"""The loop's poller names what has something to say, and that alone."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from quiesce.roles.wakes import Wakes


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any, int]]:
    context: zmq.Context[Any] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://here")
    there.connect("inproc://here")
    signal = os.eventfd(0, os.EFD_NONBLOCK)
    yield here, there, signal
    os.close(signal)
    context.destroy(linger=0)


def test_what_is_readable_is_named_until_it_is_read(ends: tuple[Any, Any, int]) -> None:
    here, there, signal = ends
    wakes = Wakes()
    wakes.register(here, zmq.POLLIN)
    wakes.register(signal, zmq.POLLIN)
    assert not wakes.any_of(here, signal)  # nobody has looked yet
    assert wakes.poll(0) == [] and not wakes.any_of(here, signal)
    there.send(b"one")
    there.send(b"two")
    wakes.poll(30_000)
    assert wakes.any_of(here) and wakes.any_of(signal, here) and not wakes.any_of(signal)
    here.recv()
    os.eventfd_write(signal, 1)
    wakes.poll(30_000)
    assert wakes.any_of(here) and wakes.any_of(signal)
    here.recv()
    os.eventfd_read(signal)
    wakes.poll(0)
    assert not wakes.any_of(here, signal)
