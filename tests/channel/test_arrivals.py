"""Everybody who knocks at a listener is counted, once, as what he turned out to be."""

from __future__ import annotations

import secrets
import socket

import zmq
from channel_bench import Bench, wait_for

from quiesce.channel import KeyPair, Link
from quiesce.channel.frames import SETTLED, Arrivals

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"


def knock(endpoint: str, said: bytes) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 5) as raw:
        raw.settimeout(0.2)
        raw.sendall(said)
        try:
            raw.recv(4096)
        except OSError:
            return


def test_d7_every_stranger_at_a_listener_is_counted_by_what_he_was(bench: Bench) -> None:
    listener = bench.listen()
    now = [100.0]
    arrivals = listener.counts.arrivals = Arrivals(lambda: now[0])
    bench.link_up(listener.endpoint)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + secrets.token_bytes(60), b"\0" * 64):
        knock(listener.endpoint, said)
    for said in (GREETING, b"", GREETING + b"\0CURVE" + b"\0" * 15):
        knock(listener.endpoint, said)
    knock(listener.endpoint, GREETING + b"\0NULL" + b"\0" * 60)
    stranger = Link(bench.context, listener.endpoint, bench.server.public, KeyPair.generate())

    def heard() -> bool:
        listener.receive()
        failed = arrivals.failed()
        return arrivals.accepted == 9 and (failed["key"], failed["half"], failed["protocol"]) == (1, 3, 1)

    wait_for(heard)
    stranger.close()
    assert arrivals.peers == 1
    assert arrivals.failed()["foreign"] == 0, "it may still become a peer's"
    now[0] += SETTLED + 2
    assert arrivals.failed() == {"key": 1, "half": 3, "protocol": 1, "foreign": 3}


def test_what_is_foreign_is_never_taken_back_and_never_more_than_there_was() -> None:
    now = [0.0]
    arrivals = Arrivals(lambda: now[0])
    for _ in range(5):
        arrivals.take(zmq.EVENT_ACCEPTED)
    assert arrivals.failed()["foreign"] == 0
    now[0] = SETTLED + 2
    assert arrivals.failed()["foreign"] == 5
    for _ in range(3):
        arrivals.take(zmq.EVENT_ACCEPTED)
        arrivals.take(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert arrivals.failed()["foreign"] == 5
    now[0] += SETTLED + 2
    assert arrivals.failed()["foreign"] == 5 and arrivals.peers == 3
