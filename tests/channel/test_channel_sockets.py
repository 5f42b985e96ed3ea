from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq
from channel_bench import Bench, wait_for

from quiesce.channel import KeyPair, KeyRing, Link, LinkEvent, Listener, start_authenticator
from quiesce.channel.options import HIGH_WATER, configure_link
from quiesce.core.codec import Codec
from quiesce.core.messages import Cancel, Inspected, Registered

PEER = Path(__file__).with_name("peer_process.py")


def test_messages_arrive_with_the_key_their_sender_proved(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.link_up(listener.endpoint)
    assert link.send(Cancel(rid="a", reason="client gone"))
    (received,) = wait_for(listener.receive)
    assert received.message == Cancel(rid="a", reason="client gone")
    assert received.user == bench.client.public
    assert bench.ring.name_of(received.user) == "client"
    assert listener.send(received.sender, Registered(router_epoch=7))
    assert wait_for(link.receive) == [Registered(router_epoch=7)]


def test_the_channel_runs_over_a_socket_file_too(bench: Bench) -> None:
    path = bench.folder / "c"
    listener = bench.listen(f"ipc://{path}")
    link = bench.link_up(listener.endpoint)
    assert link.send(Registered(router_epoch=1))
    assert wait_for(listener.receive)[0].message == Registered(router_epoch=1)
    listener.close()
    assert wait_for(lambda: not path.exists())


def test_a_client_whose_key_is_not_in_the_ring_is_refused(bench: Bench) -> None:
    listener = bench.listen()
    stranger = bench.link(listener.endpoint, keys=KeyPair.generate())
    assert wait_for(stranger.state_changes) == [LinkEvent.DOWN]
    assert not stranger.send(Registered(router_epoch=1))
    assert stranger.dropped == 1
    friend = bench.link_up(listener.endpoint)
    assert friend.send(Registered(router_epoch=2))
    assert [r.message for r in wait_for(listener.receive)] == [Registered(router_epoch=2)]
    assert stranger.state_changes() == []


def test_a_refusal_is_final_for_a_link_and_a_new_one_gets_in_once_the_ring_knows_the_key(bench: Bench) -> None:
    listener = bench.listen()
    keys = KeyPair.generate()
    link = bench.link(listener.endpoint, keys=keys)
    assert wait_for(link.state_changes) == [LinkEvent.DOWN]
    assert link.refused
    bench.ring.add("late", keys.public)
    assert wait_for(bench.link(listener.endpoint, keys=keys).state_changes) == [LinkEvent.UP]


def test_h16_the_key_of_a_replaced_process_opens_no_session_under_the_old_name(bench: Bench) -> None:
    listener = bench.listen()
    successor = KeyPair.generate()
    bench.ring.add("client", successor.public)
    predecessor = bench.link(listener.endpoint)
    assert wait_for(predecessor.state_changes) == [LinkEvent.DOWN]
    assert not predecessor.send(Registered(router_epoch=1))
    link = bench.link(listener.endpoint, keys=successor)
    assert wait_for(link.state_changes) == [LinkEvent.UP]
    assert link.send(Registered(router_epoch=2))
    (received,) = wait_for(listener.receive)
    assert (received.user, received.message) == (successor.public, Registered(router_epoch=2))


def test_a_link_that_expects_another_server_goes_down(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.link(listener.endpoint, server=KeyPair.generate().public)
    assert wait_for(link.state_changes) == [LinkEvent.DOWN]
    assert not link.send(Registered(router_epoch=1))


def test_a_listener_lets_nobody_in_until_an_authenticator_runs(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = KeyPair.generate(), KeyPair.generate()
    listener = Listener(context, "tcp://127.0.0.1:*", server)
    link = Link(context, listener.endpoint, server.public, client)
    try:
        assert wait_for(link.state_changes) == [LinkEvent.DOWN]
        assert not link.refused
        ring = KeyRing(tmp_path)
        ring.add("client", client.public)
        authenticator = start_authenticator(context, ring)
        assert wait_for(link.state_changes) == [LinkEvent.UP]
        authenticator.stop()
    finally:
        link.close()
        listener.close()
        context.term()


def test_a_peer_without_any_key_gets_nothing_through(bench: Bench) -> None:
    listener = bench.listen()
    plain = bench.context.socket(zmq.DEALER)
    plain.set(zmq.LINGER, 0)
    plain.connect(listener.endpoint)
    plain.send(Codec().encode(Registered(router_epoch=666)))
    friend = bench.link_up(listener.endpoint)
    assert friend.send(Registered(router_epoch=2))
    assert [r.message for r in wait_for(listener.receive)] == [Registered(router_epoch=2)]
    plain.close()


def test_malformed_input_is_dropped_and_counted_and_the_next_message_is_read(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.link_up(listener.endpoint)
    good = Codec().encode(Registered(router_epoch=3))
    for frames in ([b""], [b"\xc1junk"], [msgspec.msgpack.encode(["NoSuch", 1])], [good, b"extra"]):
        link.socket.send_multipart(frames)
    assert link.send(Registered(router_epoch=3))
    assert [r.message for r in wait_for(listener.receive)] == [Registered(router_epoch=3)]
    assert listener.malformed == 4


def test_a_message_over_the_limit_is_not_sent_and_one_forced_through_is_cut_off(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.link_up(listener.endpoint)
    huge = Inspected(seq=1, samples=[], state={"x": "y" * (Codec.MAX_BYTES + 1)})
    assert not link.send(huge)
    assert link.dropped == 1
    link.socket.send(b"x" * (Codec.MAX_BYTES + 4096))
    assert LinkEvent.DOWN in wait_for(link.state_changes)
    assert listener.receive() == []


def test_sends_to_a_peer_that_does_not_read_end_with_false_and_never_wait(bench: Bench) -> None:
    listener = bench.listen()
    link = bench.link_up(listener.endpoint)
    started = time.monotonic()
    fat = Cancel(rid="r", reason="x" * 10_000)
    sent = 0
    while link.send(fat):
        sent += 1
        assert sent < 20 * HIGH_WATER, "the queue has no bound"
    assert link.dropped == 1
    assert time.monotonic() - started < 20
    wait_for(lambda: [r for r in listener.receive() if r.message == fat])


def test_an_answer_to_a_peer_that_is_gone_is_false(bench: Bench) -> None:
    listener = bench.listen()
    assert not listener.send(b"\0nobody", Registered(router_epoch=1))
    link = bench.link_up(listener.endpoint)
    assert link.send(Registered(router_epoch=1))
    (received,) = wait_for(listener.receive)
    link.close()
    wait_for(lambda: not listener.send(received.sender, Registered(router_epoch=2)))
    assert listener.dropped == 2


def test_nothing_is_queued_for_a_peer_that_is_not_there(bench: Bench) -> None:
    endpoint = f"ipc://{bench.folder / 'later'}"
    link = bench.link(endpoint)
    assert not link.send(Registered(router_epoch=1))
    assert wait_for(link.state_changes) == [LinkEvent.DOWN]
    back = bench.listen(endpoint)
    assert wait_for(link.state_changes) == [LinkEvent.UP]
    assert link.send(Registered(router_epoch=2))
    assert [r.message for r in wait_for(back.receive)] == [Registered(router_epoch=2)]


def test_closing_with_a_full_queue_does_not_linger(bench: Bench) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = bench.listen()
    link = Link(context, listener.endpoint, bench.server.public, bench.client)
    wait_for(lambda: LinkEvent.UP in link.state_changes())
    while link.send(Cancel(rid="r", reason="x" * 10_000)):
        pass
    started = time.monotonic()
    link.close()
    context.term()
    assert time.monotonic() - started < 20, "ZeroMQ would linger for ever"


def test_a14_a_killed_peer_is_noticed_at_once(bench: Bench) -> None:
    bench.server.save(bench.folder / "peer.key")
    process = subprocess.Popen([sys.executable, str(PEER), str(bench.folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        link = bench.link_up(endpoint)
        assert link.send(Registered(router_epoch=11))
        assert wait_for(link.receive) == [Registered(router_epoch=11)]
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for(link.state_changes) == [LinkEvent.DOWN]  # nothing was sent that could have failed
        assert not link.send(Registered(router_epoch=12))
    finally:
        process.kill()
        process.wait()


def test_a_routing_id_in_use_cannot_be_taken_over(bench: Bench) -> None:
    listener = bench.listen()
    owner = bench.link_up(listener.endpoint)
    assert owner.send(Registered(router_epoch=1))
    (first,) = wait_for(listener.receive)
    thief = bench.context.socket(zmq.DEALER)
    configure_link(thief, bench.server.public, bench.client)
    thief.set(zmq.ROUTING_ID, first.sender)
    thief.connect(listener.endpoint)
    thief.send(Codec().encode(Registered(router_epoch=666)))  # waits until the thief's handshake is through
    friend = bench.link_up(listener.endpoint)
    assert friend.send(Registered(router_epoch=3))
    assert [r.message for r in wait_for(listener.receive)] == [Registered(router_epoch=3)]
    assert listener.send(first.sender, Registered(router_epoch=2))
    assert wait_for(owner.receive) == [Registered(router_epoch=2)]
    assert thief.poll(0) == 0
    thief.close(linger=0)
