"""Engines that are lent peer by peer, on every lane that this machine has: what lands, what does not any more, and
what is said about it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quiesce.core.messages import Grant
from quiesce.transfer import agent_lender
from quiesce.transfer import attach as wire
from quiesce.transfer.agent import Engine
from quiesce.transfer.agents import AgentTransport
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.couriers import inside_engines
from quiesce.transfer.interface import Access, Outcome, Peer, PeerLost, Post
from quiesce.transfer.mooncake import MooncakeEngine
from quiesce.transfer.nixl import NixlEngine
from quiesce.transfer.window import Window

ENGINES: list[Engine] = [NixlEngine("tcp", devices="lo"), NixlEngine("cma", devices="lo"), MooncakeEngine("tcp")]
PAGES, PAGE_BYTES = 512, 64 << 10
ALL = list(range(PAGES))
SENTINEL = 0xEE
PATIENCE = 60.0
LATE_SECONDS = 0.7  # ten times what all that can be under way takes to land


class Side:
    def __init__(self, engine: Engine, run_dir: Path, epoch: int) -> None:
        self.epoch = epoch
        self.transport = AgentTransport(engine, run_dir, epoch, max_transfer_pages=128)
        self.arena = shared_arena(PAGES, PAGE_BYTES)
        self.transport.register(self.arena)
        self.ended: dict[Post, Outcome] = {}
        self.lost: list[PeerLost] = []

    def turn(self) -> None:
        for post, outcome in self.transport.poll():
            assert post not in self.ended, "an outcome is told once"
            self.ended[post] = outcome
        self.lost += self.transport.events()


class Pair:
    def __init__(self, engine: Engine, run_dir: Path) -> None:
        self.lender, self.poster = (Side(engine, run_dir, epoch) for epoch in (0xD, 0xB))
        self.sides = [self.lender, self.poster]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits on the transports' own descriptors, so that a missed wake-up fails as well."""
        deadline = time.monotonic() + PATIENCE
        poller = select.poll()
        for side in self.sides:
            poller.register(side.transport.fileno(), select.POLLIN)
        while True:
            for side in self.sides:
                side.turn()
            value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            poller.poll(1000)

    def attach(self) -> Peer:
        descriptor = self.lender.transport.descriptor(self.poster.epoch)
        peer = self.poster.transport.connect(descriptor, self.poster.epoch)
        self.until(lambda: self.lender.transport.generation(self.poster.epoch), "the attachment")
        return peer

    def grant(self, pages: list[int] = ALL, access: Access = "write") -> Grant:
        generation = self.lender.transport.lend(self.poster.epoch, pages, access=access)
        assert generation is not None
        return Grant(0, generation, tuple(pages))

    def outcome(self, post: Post) -> Outcome:
        return self.until(lambda: self.poster.ended.get(post), f"the outcome of {post}")

    def stays(self, side: Side) -> int:
        """Pages that changed although they were given away."""
        side.arena.pages[:] = SENTINEL
        deadline = time.monotonic() + LATE_SECONDS
        while time.monotonic() < deadline:
            for each in self.sides:
                each.turn()
            time.sleep(0.01)
        return int((side.arena.pages != SENTINEL).any(axis=1).sum())


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.caps.label)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(request.param, tmp_path)
    yield made
    for side in made.sides:
        side.transport.close_all()
    for thread in inside_engines():  # one that came back after the interpreter had ended would abort the process
        thread.join(PATIENCE)


def numbered(side: Side) -> None:
    side.arena.pages[:] = (np.arange(PAGES) % 199 + 1).astype(np.uint8)[:, None]


def test_what_is_read_is_there_when_it_is_placed(pair: Pair) -> None:
    numbered(pair.lender)
    peer = pair.attach()
    post = pair.poster.transport.read(peer, ALL[::-1], ALL, pair.grant(access="read"))
    assert pair.outcome(post) is Outcome.PLACED
    assert (pair.poster.arena.pages[::-1] == pair.lender.arena.pages).all()


def test_a_batch_never_writes_a_page_twice_at_a_time(pair: Pair) -> None:
    """Posts of one page are put together with others, and still the last one posted wins."""
    numbered(pair.poster)
    peer = pair.attach()
    grant = pair.grant()
    posts = [pair.poster.transport.write(peer, [n, n + 1], [3, 10 + n], grant) for n in range(40)]
    for post in posts:
        assert pair.outcome(post) is Outcome.PLACED
    assert (pair.lender.arena.pages[3] == 40).all()


def test_a_fence_under_fire_lets_nothing_land_and_disturbs_one_peer_only(pair: Pair, tmp_path: Path) -> None:
    caps = pair.lender.transport.caps
    other = Side(pair.poster.transport._engine, tmp_path, 0xA)
    try:
        pair.sides.append(other)
        numbered(pair.poster)
        peer = pair.attach()
        bystander = other.transport.connect(pair.lender.transport.descriptor(other.epoch), other.epoch)
        bystanders = pair.until(lambda: pair.lender.transport.generation(other.epoch), "the other peer")
        grant = pair.grant()
        posts = [pair.poster.transport.write(peer, ALL, ALL, grant) for _ in range(6)]
        pair.until(lambda: bool((pair.lender.arena.pages[:64] != 0).any()), "bytes to land")
        first = pair.lender.transport.fence(pair.poster.epoch, grant.generation)
        if caps.fence == "none":
            assert first is None
            assert pair.lender.transport.gone(pair.poster.epoch) is None
            return
        proof = first or pair.until(
            lambda: pair.lender.transport.fence(pair.poster.epoch, grant.generation), "the proof"
        )
        assert (proof.kind, proof.peer_epoch) == ("fenced", pair.poster.epoch)
        assert proof.generation >= grant.generation
        assert pair.stays(pair.lender) == 0
        assert pair.lender.transport.generation(other.epoch) == bystanders, "the other peer was hit"
        assert pair.lender.transport.counters()["agents_rebuilt"] == 1
        ends = {pair.outcome(post) for post in posts}
        assert Outcome.UNKNOWN in ends or Outcome.FAILED_CLEAN in ends
        pair.until(lambda: pair.lender.transport.generation(pair.poster.epoch), "the peer to attach again")
        assert pair.outcome(pair.poster.transport.write(peer, [1], [2], grant)) is Outcome.FAILED_CLEAN
        assert pair.outcome(pair.poster.transport.write(peer, [1], [2], pair.grant())) is Outcome.PLACED
        grant = Grant(0, bystanders, (5,))
        post = other.transport.write(bystander, [0], [5], grant)
        pair.until(lambda: other.ended.get(post), "the bystander's post")
        assert other.ended[post] is Outcome.PLACED
    finally:
        other.transport.close_all()


def test_a_fence_of_own_reads_lets_nothing_land(pair: Pair) -> None:
    """What was being read lands nowhere; the peer that lends is disturbed in nothing."""
    numbered(pair.lender)
    peer = pair.attach()
    grant = pair.grant(access="read")
    posts = [pair.poster.transport.read(peer, ALL, ALL, grant) for _ in range(6)]
    pair.until(lambda: bool((pair.poster.arena.pages != 0).any()), "bytes to arrive")
    source = pair.lender.epoch
    proof = pair.poster.transport.fence(source, grant.generation)
    proof = proof or pair.until(lambda: pair.poster.transport.fence(source, grant.generation), "the proof")
    assert (proof.kind, proof.peer_epoch, proof.generation) == ("fenced", source, grant.generation)
    assert pair.stays(pair.poster) == 0
    for post in posts:
        pair.outcome(post)  # lost or refused, but it ends
    pair.until(lambda: pair.poster.transport.drain(peer), "the reads to be over")
    refused = pair.poster.transport.read(peer, [0], [0], grant)
    assert pair.outcome(refused) is Outcome.FAILED_CLEAN, "a fenced grant is read under again"


def test_reads_that_were_fenced_are_over_before_their_engine_has_let_go_of_them(pair: Pair) -> None:
    """A lender that stands still would keep them open. What its engine stores after all lands nowhere."""
    numbered(pair.lender)
    peer = pair.attach()
    poster = pair.poster.transport
    courier = poster._poster._targets[peer.number].courier
    assert courier is not None and courier._agent is not None
    inside, goes_on, real = threading.Event(), threading.Event(), courier._agent.post

    def stands_still(direction: Any, own: np.ndarray, theirs: np.ndarray) -> object:
        inside.set()
        assert goes_on.wait(PATIENCE)
        return real(direction, own, theirs)

    courier._agent.post = stands_still  # type: ignore[method-assign]
    grant = pair.grant(access="read")
    read = poster.read(peer, ALL, ALL, grant)
    assert inside.wait(PATIENCE)
    assert poster.fence(pair.lender.epoch, grant.generation) is not None
    assert pair.outcome(read) is Outcome.FAILED_CLEAN and poster.drain(peer)
    pair.poster.arena.pages[:] = SENTINEL
    goes_on.set()
    pair.until(lambda: courier not in poster._poster._by_courier, "the engine to be through and its agent to end")
    assert (pair.poster.arena.pages == SENTINEL).all()
    assert poster.counters()["placed_pages"] == poster.counters()["unknown_posts"] == 0, "it is told twice"


def test_a_fence_of_own_reads_with_none_under_way_leaves_later_grants_readable(pair: Pair) -> None:
    """The attachment stayed, and with it the generation that had been fenced: every later read was refused."""
    numbered(pair.lender)
    peer = pair.attach()
    grant = pair.grant(access="read")
    assert pair.outcome(pair.poster.transport.read(peer, [9], [7], grant)) is Outcome.PLACED
    assert pair.poster.transport.fence(pair.lender.epoch, grant.generation) is not None
    assert pair.outcome(pair.poster.transport.read(peer, [9], [7], grant)) is Outcome.FAILED_CLEAN
    generation = pair.lender.transport.generation
    pair.until(lambda: (generation(pair.poster.epoch) or 0) > grant.generation, "another generation")
    again = pair.poster.transport.read(peer, [9], [7], pair.grant(access="read"))
    assert pair.outcome(again) is Outcome.PLACED and pair.poster.arena.pages[9, 0] == 8


def test_an_attachment_that_ends_is_proven_by_its_agents_end(pair: Pair) -> None:
    peer = pair.attach()
    generation = pair.grant().generation
    assert pair.lender.transport.gone(pair.poster.epoch) is None
    pair.poster.transport.disconnect(peer)
    told = lambda: [lost for lost in pair.lender.lost if lost.generation == generation]  # noqa: E731
    if pair.lender.transport.caps.fence == "none":
        pair.until(told, "news of the end")
        assert pair.lender.transport.gone(pair.poster.epoch) is None
        return
    pair.until(lambda: len(told()) == 2, "news of the end and of the proof")
    proof = pair.lender.transport.gone(pair.poster.epoch)
    assert proof is not None and proof.generation == generation


def test_what_is_lost_is_shown_to_have_landed_or_to_have_ended_with_its_agent(pair: Pair) -> None:
    """A batch that raises taints. Proofs: one more write on the same agents, awaited; or the lender's word, with the
    next attachment, that it has ended the agent through which the lost one went."""
    numbered(pair.poster)
    peer = pair.attach()
    courier = pair.poster.transport._poster._targets[peer.number].courier
    assert courier is not None and courier._agent is not None
    real = courier._agent.over

    def fails_once(batch: object) -> bool:
        if real(batch):
            courier._agent.over = real  # type: ignore[method-assign,union-attr]
            raise RuntimeError("lost")
        return False

    courier._agent.over = fails_once  # type: ignore[method-assign]
    lost = pair.poster.transport.write(peer, [7], [9], pair.grant())
    assert pair.outcome(lost) is Outcome.UNKNOWN
    if pair.poster.transport.caps.drain == "flush":
        pair.until(lambda: pair.poster.transport.drain(peer), "the drain write")
        assert pair.poster.transport.counters()["drain_writes"] == 1
        assert pair.outcome(pair.poster.transport.write(peer, [7], [9], pair.grant())) is Outcome.PLACED
    else:
        assert not pair.poster.transport.drain(peer), "nothing has shown that it landed"
        pair.until(lambda: pair.poster.lost, "the connection to be made anew")
        pair.until(lambda: pair.lender.transport.generation(pair.poster.epoch), "the peer to attach again")
        pair.until(
            lambda: pair.poster.transport.drain(peer), "the lender's word that the lost one's agent is no more"
        )
        assert pair.lender.transport.counters()["agents_ended"] == 1, "the lender says so because it is so"
        assert pair.outcome(pair.poster.transport.write(peer, [7], [9], pair.grant())) is Outcome.PLACED


def lose_one(pair: Pair, peer: Peer) -> None:
    courier = pair.poster.transport._poster._targets[peer.number].courier
    assert courier is not None and courier._agent is not None

    def fails(batch: object) -> bool:
        raise RuntimeError("lost")

    courier._agent.over = fails  # type: ignore[method-assign]
    assert pair.outcome(pair.poster.transport.write(peer, [7], [9], pair.grant())) is Outcome.UNKNOWN


def test_h11_connections_that_lost_something_are_bounded_and_never_called_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended before its lender could say anything more: each is remembered, and then all that are older together."""
    monkeypatch.setattr("quiesce.transfer.agent_connections.MAX_LOST", 2)
    pair = Pair(MooncakeEngine("tcp"), tmp_path)
    try:
        numbered(pair.poster)
        peers = []
        for _ in range(4):
            peers.append(pair.attach())
            lose_one(pair, peers[-1])
            pair.poster.transport.disconnect(peers[-1])
            pair.until(lambda: pair.lender.transport.generation(pair.poster.epoch) is None, "the end")
        known = pair.poster.transport._poster._targets
        pair.until(lambda: len(known) == 2, "the oldest to be forgotten")
        pair.until(
            lambda: not pair.poster.transport._poster._by_courier, "couriers, which are not kept for it, to end"
        )
        assert not any(pair.poster.transport.drain(peer) for peer in peers)
        fresh = pair.attach()
        assert pair.poster.transport.drain(fresh)
    finally:
        for side in pair.sides:
            side.transport.close_all()


def cut(pair: Pair, peer: Peer) -> None:
    """Their small connection breaks, as it does when either host goes away."""
    line = pair.poster.transport._poster._targets[peer.number].line
    assert line is not None
    line.sock.shutdown(socket.SHUT_RDWR)


def test_a_readers_agent_ends_once_its_reader_says_that_it_reads_no_more(tmp_path: Path) -> None:
    """Before that UCX would crash: an agent must not end while it answers reads."""
    pair = Pair(NixlEngine("tcp", devices="lo"), tmp_path)
    numbered(pair.lender)
    lender, poster = (side.transport for side in pair.sides)
    for turn in range(1, 6):
        peer = pair.attach()
        grant = pair.grant(access="read")
        read = poster.read(peer, ALL, ALL, grant)
        if turn < 5:
            poster.disconnect(peer)
        assert pair.outcome(read) in (Outcome.PLACED, Outcome.FAILED_CLEAN)
        if turn == 5:
            pair.sides.remove(pair.poster)
            poster.close_all()  # its process leaves
        pair.until(lambda turn=turn: lender.counters()["agents_ended"] == turn, "its agent to end")
        proof = lender.fence(pair.poster.epoch, grant.generation)
        assert proof is not None and proof.generation == grant.generation
    assert lender.used_up() is None and lender._lender._left == 0
    lender.close_all()


def test_readers_agents_that_cannot_be_ended_are_bounded_and_then_it_says_that_it_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that goes away without a word may still be reading: its agent is left; the worker restarts for it."""
    monkeypatch.setattr(agent_lender, "MAX_LEFT", 2)
    pair = Pair(NixlEngine("tcp", devices="lo"), tmp_path)
    lender = pair.lender.transport
    peer = pair.attach()
    for left in range(1, 3):
        assert lender.used_up() is None, f"{left} are left"
        generation = pair.grant(access="read").generation
        before = lender.counters()["attach_refused"]
        cut(pair, peer)
        if left == 1:
            pair.until(lambda was=generation: (lender.generation(pair.poster.epoch) or 0) > was, "it to attach anew")
    pair.until(lambda: lender.counters()["attach_refused"] > before, "the third reader to be turned away")
    said = lender.used_up()
    assert said is not None and said.startswith("2 agents of nixl/tcp are left over from readers")
    assert lender.generation(pair.poster.epoch) is None and lender.counters()["agents_ended"] == 0
    for side in pair.sides:
        side.transport.close_all()


def test_a_waiting_post_can_be_withdrawn_and_a_started_one_cannot(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.grant()
    posts = [pair.poster.transport.write(peer, ALL, ALL, grant) for _ in range(6)]
    assert not pair.poster.transport.try_cancel(posts[0])
    assert pair.poster.transport.try_cancel(posts[-1])
    for post in posts[:-1]:
        assert pair.outcome(post) is Outcome.PLACED
    assert posts[-1] not in pair.poster.ended
    assert pair.poster.transport.drain(peer)


def test_nobody_attaches_without_the_token(pair: Pair) -> None:
    descriptor = pair.lender.transport.descriptor(0x666)  # another peer's
    peer = pair.poster.transport.connect(descriptor, pair.poster.epoch)
    pair.until(lambda: [lost for lost in pair.poster.lost if lost.final], "the refusal")
    assert pair.lender.transport.generation(pair.poster.epoch) is None
    assert pair.outcome(pair.poster.transport.write(peer, [0], [0], Grant(0, 1, (0,)))) is Outcome.FAILED_CLEAN


def test_a_greeting_with_no_epoch_is_refused_and_disturbs_nobody(pair: Pair) -> None:
    descriptor = msgspec.msgpack.decode(pair.lender.transport.descriptor(0xB), type=wire.Descriptor)
    line = wire.dial(descriptor.address)
    line.say(wire.Greet(-1, b"c" * 16))
    pair.until(lambda: pair.lender.transport.counters()["attach_refused"], "it to be counted")
    line.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "shm"}, "the peer moves pages by shm"),
        ({"page_bytes": 17}, "pages of 17 bytes there"),
        ({"pages": 0}, "cannot have 0 pages"),
        ({"address": "tcp:nowhere:0"}, "not where a lender can listen"),
        ({"address": "unix:relative"}, "not where a lender can listen"),
    ],
)
def test_descriptors_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    side = Side(ENGINES[0], tmp_path, 0xD)
    try:
        good = msgspec.msgpack.decode(side.transport.descriptor(0xB), type=wire.Descriptor)
        with pytest.raises(ValueError, match=said):
            side.transport.connect(msgspec.msgpack.encode(msgspec.structs.replace(good, **change)), 0xB)
        with pytest.raises(ValueError, match="not the descriptor"):
            side.transport.connect(b"\xc1", 0xB)
    finally:
        side.transport.close_all()


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no lane 'smoke'"):
        AgentTransport(NixlEngine("smoke"), tmp_path, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no lane 'smoke'"):
        AgentTransport(MooncakeEngine("smoke"), tmp_path, 1)  # type: ignore[arg-type]
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ValueError, match="MC_TCP_PROTO is set"):
        AgentTransport(MooncakeEngine("tcp"), tmp_path, 1)
    assert os.environ.get("MC_TRANSFER_TIMEOUT") in (None, "1000000")


def test_the_end_of_an_engine_of_mooncake_stops_no_other_thread() -> None:
    """Its destructor waits a second with the interpreter held: the whole worker stood still for it."""
    lent = MooncakeEngine("tcp").lend(Window(shared_arena(4, 4096)))
    ending, began, turns = threading.Thread(target=lent.end), time.monotonic(), 0
    ending.start()
    while ending.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 5 or time.monotonic() - began < 0.5


def test_mooncake_takes_every_setting_that_we_pin(tmp_path: Path) -> None:
    """It warns of a value that is none for it, and goes on with its own default, whose timeouts do fire."""
    start = (
        "from quiesce.transfer.mooncake import MooncakeEngine; from quiesce.transfer.window import Window\n"
        "from quiesce.transfer.arena import shared_arena\n"
        "engine = MooncakeEngine('tcp'); engine.check(); engine.lend(Window(shared_arena(2, 4096))); print('made')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", start],
        env=os.environ | {"MC_LOG_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    assert ended.stdout.strip() == "made"
    assert "WARNING: Logging" in ended.stderr or "No RDMA devices" in ended.stderr, "its warnings are not heard"
    assert "Invalid" not in ended.stderr, ended.stderr
