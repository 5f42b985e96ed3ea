"""tcp: who may connect, what is refused, and that a fence is exact to the byte."""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.lab.faulty import Fate
from quiesce.lab.race.journal import GatedTransport
from quiesce.lab.unsafe import keep_addresses, live_at, place_anything
from quiesce.transfer import tcp_lender
from quiesce.transfer import tcp_wire as wire
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Peer, PeerLost, Post
from quiesce.transfer.tcp import TcpTransport
from quiesce.transfer.tcp_wire import ANSWER, HEADER, Header, Kind, Status

PAGES, PAGE_BYTES = 64, 4096
D, P = 0xD, 0xB
PATIENCE = 60.0


class Side:
    def __init__(self, epoch: int, **settings: Any) -> None:
        self.epoch = epoch
        self.transport = TcpTransport(epoch, **settings)
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
    def __init__(self, **settings: Any) -> None:
        self.sides: list[Side] = []
        self.lender, self.poster = self.side(D, **settings), self.side(P, **settings)
        self.poster.arena.pages[:] = 7

    def side(self, epoch: int, **settings: Any) -> Side:
        self.sides.append(Side(epoch, **settings))
        return self.sides[-1]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            for side in self.sides:
                side.turn()
            value = condition()
            if value:
                return value
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            select.select([side.transport for side in self.sides], [], [], 0.2)

    def attach(self) -> Peer:
        peer = self.poster.transport.connect(self.lender.transport.descriptor(P), P)
        self.until(lambda: self.lender.transport.generation(P), "the attachment")
        self.until(lambda: self.poster.transport._poster._targets[peer.number].attached, "the poster to know")
        return peer

    def lend(self, pages: range = range(PAGES), access: Any = "write") -> Grant:
        generation = self.lender.transport.lend(P, pages, access=access)
        assert generation is not None
        return Grant(0, generation, tuple(pages))

    def outcome(self, post: Post) -> Outcome:
        ended: Outcome = self.until(lambda: self.poster.ended.get(post), f"the outcome of {post}")
        return ended

    def counted(self, name: str) -> int:
        return self.lender.transport.counters().get(name, 0)

    def close(self) -> None:
        for side in self.sides:
            side.transport.close_all()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(lanes=2, max_transfer_pages=8)
    yield pair
    pair.close()


class Raw:
    """A poster that does what it likes after an honest handshake."""

    def __init__(self, pair: Pair, epoch: int = P, **changes: Any) -> None:
        found = msgspec.msgpack.decode(pair.lender.transport.descriptor(changes.pop("asked", epoch)))
        self.sock = socket.create_connection((found["host"], found["port"]))
        knock = wire.Knock(wire.PROTOCOL, epoch, epoch, 1, 0, 1, secrets.token_bytes(16))
        knock = msgspec.structs.replace(knock, **{k: v for k, v in changes.items() if k in knock.__struct_fields__})
        secret = changes.get("secret", found["secret"])
        wire.send_packet(self.sock, knock)
        pair_turns = threading.Event()
        serving = threading.Thread(target=self._serve, args=(pair, pair_turns))
        serving.start()
        try:
            self.answer = wire.receive_packet(self.sock, time.monotonic() + PATIENCE)
            if isinstance(self.answer, wire.Challenge):
                proof = wire.proof_of(secret, b"poster", knock, self.answer.nonce)
                wire.send_packet(self.sock, wire.Response(proof))
                self.answer = wire.receive_packet(self.sock, time.monotonic() + PATIENCE)
        finally:
            pair_turns.set()
            serving.join()

    @staticmethod
    def _serve(pair: Pair, over: threading.Event) -> None:
        while not over.wait(0.005):
            pair.lender.turn()

    def head(self, grant: Grant, pages: list[int], kind: int = Kind.WRITE, length: int | None = None) -> None:
        length = len(pages) * PAGE_BYTES if length is None else length
        header = HEADER.pack(*Header(kind, grant.region, len(pages), 1, grant.generation, length))
        self.sock.sendall(header + struct.pack(f"<{len(pages)}I", *pages))

    def status(self) -> Status:
        self.sock.settimeout(PATIENCE)
        return Status(ANSWER.unpack(self.sock.recv(ANSWER.size, socket.MSG_WAITALL))[0])

    def is_closed(self) -> bool:
        self.sock.settimeout(PATIENCE)
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True


# ---------------------------------------------------------------- who may connect


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": b"x" * 32}, "wrong secret"),
        ({"asked": 0xC, "holder": P}, "wrong secret"),  # the descriptor of another peer
        ({"asked": 0xC, "holder": 0xC}, "another peer"),
        ({"asked": P, "holder": wire.ANYBODY}, "wrong secret"),
        ({"version": 99}, "protocol version: 1 here, 99 there"),
        ({"lanes": 3, "lane": 2}, "another peer"),
    ],
)
def test_a_connection_without_the_right_secret_is_turned_away(
    pair: Pair, changes: dict[str, Any], reason: str
) -> None:
    raw = Raw(pair, **changes)
    assert isinstance(raw.answer, wire.TurnedAway) and raw.answer.final and reason in raw.answer.reason
    assert raw.is_closed() and pair.counted("attach_refused") == 1
    assert pair.lender.transport.generation(P) is None


def test_a_greeting_with_no_epoch_is_malformed(pair: Pair) -> None:
    with pytest.raises(wire.Closed):
        Raw(pair, epoch=-1, asked=P)
    assert pair.until(lambda: pair.counted("malformed"), "it to be counted") == 1


def test_who_claims_the_epoch_0_gets_no_secret_that_opens_all(pair: Pair) -> None:
    with pytest.raises(ValueError, match="epoch 0"):
        pair.lender.transport.reply(wire.ANYBODY, b"", pull=True)


def test_the_secret_itself_never_travels(pair: Pair) -> None:
    secret = msgspec.msgpack.decode(pair.lender.transport.descriptor(P))["secret"]
    knock = wire.Knock(wire.PROTOCOL, P, P, 1, 0, 1, b"n" * 16)
    said = [wire.proof_of(secret, side, knock, b"c" * 16) for side in (b"lender", b"poster")]
    assert secret not in said and said[0] != said[1], "nor can one side's proof be sent back as the other's"


def test_who_says_nothing_makes_room_for_who_does(pair: Pair) -> None:
    found = msgspec.msgpack.decode(pair.lender.transport.descriptor(P))
    mute = [socket.create_connection((found["host"], found["port"])) for _ in range(tcp_lender.MAX_HALF_OPEN)]
    pair.until(lambda: len(pair.lender.transport._lender._half_open) == len(mute), "the mute ones to be taken")
    pair.attach()
    for sock in mute:
        sock.close()


def test_garbage_is_counted_and_harms_nobody(pair: Pair) -> None:
    peer = pair.attach()
    found = msgspec.msgpack.decode(pair.lender.transport.descriptor(0xC))
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 3) + b"\xc1\xc1\xc1", b"\0" * 64):
        with socket.create_connection((found["host"], found["port"])) as sock:
            sock.sendall(garbage)
            pair.until(lambda sock=sock: select.select([sock], [], [], 0)[0], "it to be closed")
    assert pair.until(lambda: pair.counted("malformed") == 3, "three to be counted")
    assert pair.outcome(pair.poster.transport.write(peer, [0], [0], pair.lend())) is Outcome.PLACED


@pytest.mark.parametrize(
    "frame",
    [
        {"kind": 9},
        {"length": PAGE_BYTES - 1},
        {"length": 2**60},
        {"pages": []},
    ],
    ids=["kind", "short", "long", "no pages"],
)
def test_a_frame_that_does_not_add_up_ends_its_connection(pair: Pair, frame: dict[str, Any]) -> None:
    raw = Raw(pair)
    grant = pair.lend()
    raw.head(grant, **{"pages": [1], **frame})
    assert raw.is_closed() and pair.counted("malformed") == 1
    assert not pair.lender.arena.pages.any()
    lost = pair.until(lambda: pair.lender.lost, "news of it")
    assert "broke the protocol" in lost[0].reason and lost[0].peer_epoch == P


# ---------------------------------------------------------------- what was offered


@pytest.mark.parametrize("pages", [[8], [PAGES], [2**32 - 1], [0, 1, 2, 8]])
def test_what_was_not_offered_is_refused_and_counted(pair: Pair, pages: list[int]) -> None:
    raw = Raw(pair)
    grant = pair.lend(range(8))
    raw.head(grant, pages)
    raw.sock.sendall(b"\xff" * PAGE_BYTES * len(pages))
    assert raw.status() is Status.NOT_OFFERED
    raw.head(Grant(0, grant.generation + 1, grant.pages), [0])
    raw.sock.sendall(b"\xff" * PAGE_BYTES)
    assert raw.status() is Status.NOT_OFFERED, "no such transfer"
    raw.head(grant, [0], Kind.READ)
    assert raw.status() is Status.NOT_OFFERED, "lent to be written, not to be read"
    assert not pair.lender.arena.pages.any() and pair.counted("jobs_not_offered") == 3
    raw.head(grant, [0])
    raw.sock.sendall(b"\x05" * PAGE_BYTES)
    assert raw.status() is Status.PLACED and (pair.lender.arena.pages[0] == 5).all()


def test_what_is_lent_to_one_peer_is_not_to_another(pair: Pair) -> None:
    pair.attach()
    grant = pair.lend()
    thief = Raw(pair, epoch=0xC)
    thief.head(grant, [1])
    thief.sock.sendall(b"\xff" * PAGE_BYTES)
    assert thief.status() is Status.NOT_OFFERED and not pair.lender.arena.pages.any()


# ---------------------------------------------------------------- the fence


def test_h16_a_fence_in_the_middle_of_a_page_is_exact(pair: Pair) -> None:
    raw = Raw(pair)
    grant, other = pair.lend(range(2)), pair.lend(range(2, 4))
    raw.head(grant, [0, 1])
    raw.sock.sendall(b"\x01" * (PAGE_BYTES + 100))
    begun = pair.lender.arena.pages[1][:100]
    pair.until(lambda: not (begun - 1).any(), "a page and a bit to land")
    proof = pair.lender.transport.fence(P, grant.generation, frozenset(grant.pages))
    assert proof is not None and proof.pages == frozenset(grant.pages), "to be had although the poster is silent"
    pair.lender.arena.pages[:2] = 9
    raw.sock.sendall(b"\x02" * (PAGE_BYTES - 100))
    assert raw.status() is Status.REVOKED
    assert (pair.lender.arena.pages[:2] == 9).all() and pair.counted("late_bytes") == PAGE_BYTES - 100
    raw.head(other, [2])
    raw.sock.sendall(b"\x03" * PAGE_BYTES)
    assert raw.status() is Status.PLACED, "the same connection, another grant"


def test_a_source_that_is_fenced_in_the_middle_of_a_read_says_so(pair: Pair) -> None:
    raw = Raw(pair)
    grant = pair.lend(range(PAGES), access="read")
    pair.lender.arena.pages[:] = 4
    raw.head(grant, list(range(PAGES)) * 100, Kind.READ)
    assert raw.status() is Status.DATA
    assert pair.lender.transport.fence(P, grant.generation, frozenset(grant.pages)) is not None
    pair.lender.arena.pages[:] = 6  # they belong to somebody else now
    left, foreign = PAGES * 100 * PAGE_BYTES, 0
    while left:
        data = raw.sock.recv(min(left, 1 << 20))
        foreign += data.count(6)
        left -= len(data)
    assert raw.status() is Status.REVOKED
    assert not foreign, "bytes of the new owner have left"


def test_withdrawn_pages_are_not_written_any_more(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.lend()
    assert pair.outcome(pair.poster.transport.write(peer, [0], [0], grant)) is Outcome.PLACED
    pair.lender.transport.withdraw(P, grant.generation)
    pair.lender.arena.pages[:] = 9
    assert pair.outcome(pair.poster.transport.write(peer, [0], [0], grant)) is Outcome.FAILED_CLEAN
    assert (pair.lender.arena.pages == 9).all()
    assert not len(pair.lender.transport._lender.permits), "nothing is remembered of closed leases"


def test_h16_a_generation_that_was_never_granted_is_not_proven(pair: Pair) -> None:
    pair.attach()
    grant = pair.lend()
    assert pair.lender.transport.fence(P, grant.generation + 1) is None
    assert pair.lender.transport.gone(P) is None, "a dead poster's bytes may still be on their way"


# ---------------------------------------------------------------- lost connections


def test_a6_posts_on_a_lost_connection_end_when_the_lender_has_ended_it(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.lend()
    lender = pair.lender.transport._lender
    stream = lender._attached[P].streams[0]
    with stream._lock:  # the lender does not get to place anything
        posts = [pair.poster.transport.write(peer, [0], [i], grant) for i in range(8)]
        for lane in pair.poster.transport._poster._targets[peer.number].lanes:
            lane.end()
        pair.poster.turn()
        assert not any(pair.poster.transport.drain(each) for each in [peer]), "nothing is known of what was sent"
    ends = {pair.outcome(post) for post in posts}
    assert Outcome.UNKNOWN not in ends and Outcome.FAILED_CLEAN in ends
    assert [lost.final for lost in pair.poster.lost] == [False]
    pair.until(lambda: pair.lender.transport.lend(P, [0]), "the new attachment")
    assert pair.until(lambda: pair.lender.lost, "news at the lender")[0].peer_epoch == P


def test_what_is_under_way_when_the_transport_closes_is_unknown(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.lend()
    stream = pair.lender.transport._lender._attached[P].streams[0]
    with stream._lock:
        post = pair.poster.transport.write(peer, [0], [0], grant)
        pair.poster.transport.close_all()
        assert dict(pair.poster.transport.poll()) == {post: Outcome.UNKNOWN}


def test_a_lender_that_is_gone_is_gone_for_good(pair: Pair) -> None:
    peer = pair.attach()
    grant = pair.lend()
    pair.sides.remove(pair.lender)
    pair.lender.transport.close_all()
    lost = pair.until(lambda: [lost for lost in pair.poster.lost if lost.final], "the last news")
    assert lost[0].peer_epoch == D and "nobody listens there" in lost[0].reason
    assert pair.outcome(pair.poster.transport.write(peer, [0], [0], grant)) is Outcome.FAILED_CLEAN


def _end_but_for_one_receive(pair: Pair, peer: Peer) -> Any:
    """The poster's connections are lost and made anew, while the lender is in the middle of a receive on an old one
    (its lock, which is held here). Returns when the new ones have knocked."""
    lender = pair.lender.transport._lender
    old = lender._attached[P]
    for lane in pair.poster.transport._poster._targets[peer.number].lanes:
        lane.end()
    pair.until(lambda: lender._attached.get(P) not in (None, old), "the poster to knock again")
    return old


def test_h16_a_fence_waits_for_a_receive_on_a_connection_that_was_replaced(pair: Pair) -> None:
    """The old connection was out of the table already: the fence did not wait for it, and its last bytes landed in
    pages that were somebody else's by then."""
    peer = pair.attach()
    grant = pair.lend()
    stream = next(iter(pair.lender.transport._lender._attached[P].streams.values()))
    proofs: list[Any] = []
    fence = threading.Thread(target=lambda: proofs.append(pair.lender.transport.fence(P, grant.generation)))
    with stream._lock:
        _end_but_for_one_receive(pair, peer)
        fence.start()
        fence.join(0.3)
        assert not proofs, "proven while a receive may be under way"
    fence.join(PATIENCE)
    assert proofs and proofs[0] is not None


def test_a9_nothing_is_said_of_lost_posts_while_an_old_connection_can_still_place(pair: Pair) -> None:
    """Its end had begun, so the new attachment did not wait for it: the post was called FAILED_CLEAN too early."""
    peer = pair.attach()
    grant = pair.lend()
    stream = pair.lender.transport._lender._attached[P].streams[0]
    with stream._lock:
        posts = [pair.poster.transport.write(peer, [0], [i], grant) for i in range(8)]  # pages of lane 0
        _end_but_for_one_receive(pair, peer)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            pair.lender.turn()
            pair.poster.turn()
            assert Outcome.FAILED_CLEAN not in pair.poster.ended.values()
    assert Outcome.FAILED_CLEAN in {pair.outcome(post) for post in posts}
    pair.until(lambda: pair.lender.transport.generation(P), "the new attachment")
    placing = pair.lender.transport._lender._placing
    pair.until(lambda: len(placing[P]) == 2, "the old connections to be forgotten")


class Liar:
    """A lender that answers reads as it likes after an honest handshake. One lane."""

    def __init__(self, pair: Pair) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        found = msgspec.msgpack.decode(pair.lender.transport.descriptor(P), type=wire.Descriptor)
        self.descriptor = msgspec.structs.replace(found, port=self.listener.getsockname()[1], lanes=1)

    def attach(self, pair: Pair) -> Peer:
        peer = pair.poster.transport.connect(msgspec.msgpack.encode(self.descriptor), P)
        self.sock, _ = self.listener.accept()
        knock = wire.receive_packet(self.sock, time.monotonic() + PATIENCE)
        assert isinstance(knock, wire.Knock)
        self.sock.settimeout(PATIENCE)
        proof = wire.proof_of(self.descriptor.secret, b"lender", knock, b"n" * 16)
        wire.send_packet(self.sock, wire.Challenge(b"n" * 16, proof))
        wire.receive_packet(self.sock, time.monotonic() + PATIENCE)
        wire.send_packet(self.sock, wire.Attached(1))
        pair.until(lambda: pair.poster.transport._poster._targets[peer.number].attached, "the poster to know")
        return peer

    def job(self) -> int:
        self.sock.settimeout(PATIENCE)
        header = Header._make(HEADER.unpack(self.sock.recv(HEADER.size, socket.MSG_WAITALL)))
        self.sock.recv(4 * header.pages, socket.MSG_WAITALL)
        return header.job

    def close(self) -> None:
        self.sock.close()
        self.listener.close()


def test_a_read_that_ends_without_its_pages_is_not_placed(pair: Pair) -> None:
    """What was in the reader's page before would have been taken for what it asked for."""
    liar = Liar(pair)
    peer = liar.attach(pair)
    post = pair.poster.transport.read(peer, [0], [0], Grant(0, 1, (0,)))
    liar.sock.sendall(ANSWER.pack(Status.PLACED, 1, liar.job()))
    liar.listener.close()
    assert pair.outcome(post) is Outcome.FAILED_CLEAN
    liar.close()


def test_pages_of_a_read_come_once(pair: Pair) -> None:
    """A second time they would land after the read was PLACED, in pages that may be somebody else's."""
    liar = Liar(pair)
    peer = liar.attach(pair)
    post = pair.poster.transport.read(peer, [0], [0], Grant(0, 1, (0,)))
    job = liar.job()
    data = ANSWER.pack(Status.DATA, 1, job)
    placed = ANSWER.pack(Status.PLACED, 1, job)
    liar.sock.sendall(data + b"\x01" * PAGE_BYTES + placed + data + b"\x02" * PAGE_BYTES + placed)
    assert pair.outcome(post) is Outcome.PLACED
    pair.until(lambda: pair.poster.lost, "the connection to be given up")
    assert "broke the protocol" in pair.poster.lost[0].reason or "not under way" in pair.poster.lost[0].reason
    assert (pair.poster.arena.pages[0] == 1).all()
    liar.close()


# ---------------------------------------------------------------- settings


def test_a_descriptor_that_does_not_fit_names_what_differs(pair: Pair) -> None:
    other = TcpTransport(5)
    other.register(shared_arena(PAGES, PAGE_BYTES * 2))
    with pytest.raises(ValueError, match="pages of 8192 bytes there, 4096 here"):
        pair.poster.transport.connect(other.descriptor(P), P)
    with pytest.raises(ValueError, match="not the descriptor of a tcp transport"):
        pair.poster.transport.connect(b"\x81\xa4kind\xa3tcp", P)
    other.close_all()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_it_listens_at_one_address_only(host: str) -> None:
    with pytest.raises(ValueError, match="name it"):
        TcpTransport(1, host=host)


def test_an_address_of_another_host_cannot_be_listened_at() -> None:
    transport = TcpTransport(1, host="192.0.2.1")
    transport.register(shared_arena(1, 4096))
    with pytest.raises(OSError):
        transport.descriptor(P)
    transport.close_all()


def test_the_labs_twin_places_what_nobody_has_lent(pair: Pair) -> None:
    """As `quiesce race` shows it: without the check at placement late bytes land; with it they are counted."""
    peer, grant = pair.attach(), pair.lend(range(4))
    pair.lender.transport.withdraw(P, grant.generation)
    late = pair.poster.transport.write(peer, [0, 1, 2, 3], [0, 1, 2, 3], grant)
    assert pair.outcome(late) is Outcome.FAILED_CLEAN
    assert not pair.lender.arena.pages[:4].any() and pair.counted("late_bytes") == 4 * PAGE_BYTES
    place_anything(pair.lender.transport)
    late = pair.poster.transport.write(peer, [0, 1, 2, 3], [0, 1, 2, 3], grant)
    assert pair.outcome(late) is Outcome.PLACED and (pair.lender.arena.pages[:4] == 7).all()


def test_the_labs_twin_takes_over_the_address_of_a_dead_process(pair: Pair, tmp_path: Path) -> None:
    """Guard A14: a new process has an address and a secret of its own. The twin has its predecessor's, and what was
    queued for that one lands in it."""
    place = tmp_path / "place"
    live_at(pair.lender.transport, place)
    poster = pair.poster.transport
    keep_addresses(poster, poster)
    peer, grant = pair.attach(), pair.lend(range(4))
    pair.sides.remove(pair.lender)
    pair.lender.transport.close_all()
    pair.lender = pair.side(0xE)
    for twin in (live_at, lambda transport, _: place_anything(transport)):
        twin(pair.lender.transport, place)
    pair.lender.transport.descriptor(P)
    pair.until(lambda: pair.lender.transport.generation(P), "the queued connection to reach the new process")
    pair.until(lambda: poster._poster._targets[peer.number].attached, "the poster to know")
    queued = poster.write(peer, [0, 1, 2, 3], [0, 1, 2, 3], grant)
    assert pair.outcome(queued) is Outcome.PLACED and (pair.lender.arena.pages[:4] == 7).all()
    # A session with the new process goes over the connection that stands: another one would end what it has lent.
    grant = pair.lend(range(9, 10))
    assert poster.connect(pair.lender.transport.descriptor(P), P) == peer
    assert pair.outcome(poster.write(peer, [0], [9], grant)) is Outcome.PLACED
    assert not pair.lender.transport.events()


def test_the_labs_twin_lets_a_write_go_when_somebody_listens_there_again(pair: Pair, tmp_path: Path) -> None:
    """A gate that opens while the connection is being made anew: the write waits, and fails no race for nothing."""
    place, gate = tmp_path / "place", tmp_path / "gate"
    live_at(pair.lender.transport, place)
    poster = pair.poster.transport
    gated = GatedTransport(poster, lambda pages: Fate(), gate, None)
    keep_addresses(gated, poster)
    peer, grant = pair.attach(), pair.lend(range(4))
    pair.poster.transport = gated  # type: ignore[assignment]
    gate.touch()
    queued = gated.write(peer, [0, 1, 2, 3], [0, 1, 2, 3], grant)
    pair.sides.remove(pair.lender)
    pair.lender.transport.close_all()
    pair.until(lambda: not poster._poster._targets[peer.number].attached, "the connection to be lost")
    gate.unlink()
    pair.poster.turn()
    assert gated.held() == [queued]
    pair.lender = pair.side(0xE)
    live_at(pair.lender.transport, place)
    place_anything(pair.lender.transport)
    pair.lender.transport.descriptor(P)
    assert pair.outcome(queued) is Outcome.PLACED and (pair.lender.arena.pages[:4] == 7).all()
