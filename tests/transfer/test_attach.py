"""Hand-shakes with strangers: whoever connects to the lender's socket gets no memory without every proof."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from quiesce.transfer import mover_wire as wire
from quiesce.transfer import shm_lender
from quiesce.transfer.arena import SEALS
from quiesce.transfer.watch import Watch

from .conftest import PAGE_BYTES, PAGES, Pair


class Stranger:
    """Speaks the mover's part by hand, from this process."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.found = msgspec.msgpack.decode(pair.lender.transport.descriptor(), type=wire.Descriptor)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(self.found.path)

    def say(self, packet: wire.Packet) -> None:
        assert wire.send(self.sock, packet)

    def hear(self) -> wire.Received | None:
        """The lender's next packet, or None when it hangs up."""

        def ready() -> bool:
            return bool(select.select([self.sock], [], [], 0)[0])

        deadline = time.monotonic() + 30
        while not ready():
            assert time.monotonic() < deadline
            self._pair.lender.turn()
        try:
            return wire.receive(self.sock, wire.AttachDecoder)
        except wire.Closed:
            return None

    def attach(self, epoch: int = 0x666) -> wire.Received | None:
        self.say(wire.Greet(self.found.token, epoch))
        challenge = self.hear()
        assert challenge is not None
        self.say(wire.Answer(challenge.packet.nonce))
        return self.hear()


def test_a_wrong_token_gets_no_memory(pair: Pair) -> None:
    stranger = Stranger(pair)
    stranger.say(wire.Greet(secrets.token_bytes(32), 0x666))
    answer = stranger.hear()
    assert answer is not None and answer.packet == wire.TurnedAway("wrong token", True) and not answer.fds
    assert stranger.hear() is None


@pytest.mark.parametrize("nonce", [b"", b"0" * 16])
def test_a_wrong_answer_gets_no_memory(pair: Pair, nonce: bytes) -> None:
    stranger = Stranger(pair)
    stranger.say(wire.Greet(stranger.found.token, 0x666))
    assert stranger.hear() is not None
    stranger.say(wire.Answer(nonce))
    assert stranger.hear() is None


@pytest.mark.parametrize("packet", [wire.Mapped(1), wire.Answer(b"0" * 16), wire.Attached(1, 1)])
def test_out_of_turn_ends_the_connection(pair: Pair, packet: wire.Packet) -> None:
    stranger = Stranger(pair)
    stranger.say(packet)
    assert stranger.hear() is None
    assert pair.lender.transport.counters()["attach_refused"] == 1


def test_garbage_and_gifts_end_the_connection_and_leak_nothing(pair: Pair) -> None:
    pair.lender.transport.descriptor()
    before = len(os.listdir("/proc/self/fd"))
    for junk in (b"\xc1", b"x" * 5000, b"\x93" * 100):
        stranger = Stranger(pair)
        socket.send_fds(stranger.sock, [junk], [0, 1, 2])
        assert stranger.hear() is None
        stranger.sock.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_answer_from_another_process_gets_no_memory(pair: Pair) -> None:
    """The pidfd names who connected; if another one speaks, that proves nothing about the named one."""
    stranger = Stranger(pair)
    stranger.say(wire.Greet(stranger.found.token, 0x666))
    challenge = stranger.hear()
    assert challenge is not None
    answer = msgspec.msgpack.encode(wire.Answer(challenge.packet.nonce)).hex()
    code = f"import socket; socket.socket(fileno=0).send(bytes.fromhex('{answer}'))"
    subprocess.run([sys.executable, "-c", code], stdin=stranger.sock, check=True)
    assert stranger.hear() is None
    assert pair.lender.transport.generation(0x666) is None


def test_a_full_hand_shake_gives_the_generation_only_when_mapped(pair: Pair) -> None:
    stranger = Stranger(pair)
    memory = stranger.attach()
    assert memory is not None and isinstance(memory.packet, wire.Memory)
    pair.lender.turn()
    assert pair.lender.transport.generation(0x666) is None
    stranger.say(wire.Mapped(memory.packet.generation))
    pair.until(lambda: pair.lender.transport.generation(0x666), "the attachment")
    wire.close_all(memory.fds)


def test_a_second_process_of_one_epoch_waits_for_the_death_of_the_first(pair: Pair) -> None:
    """Otherwise one proof of death would leave another writer alive under the same name."""
    first = Stranger(pair)
    memory = first.attach(pair.poster.epoch)
    assert memory is not None
    first.say(wire.Mapped(memory.packet.generation))
    first.sock.close()  # detached, but its process, this one, lives on
    wire.close_all(memory.fds)
    pair.poster.transport.connect(pair.lender.transport.descriptor(), pair.poster.epoch)
    refused = pair.lender.transport.counters
    pair.until(lambda: refused()["attach_refused"] >= 2, "the second process to be turned away twice")
    assert pair.lender.transport.generation(pair.poster.epoch) is None
    assert pair.lender.transport.gone(pair.poster.epoch) is None


def test_silent_connections_are_bounded_and_dropped_in_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = []
    for _ in range(shm_lender.MAX_HALF_OPEN + 3):
        silent.append(Stranger(pair))
        pair.lender.turn()
    assert pair.lender.transport.counters()["attach_refused"] == 3
    pair.lender.transport._lender.tick(time.monotonic() + wire.ATTACH_SECONDS + 1)
    assert pair.lender.transport.counters()["attach_refused"] == 3 + shm_lender.MAX_HALF_OPEN
    pair.attach()


def test_a_deadline_wakes_the_lender_by_itself(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ATTACH_SECONDS", 0.05)
    stranger = Stranger(pair)
    pair.until(lambda: pair.lender.transport.counters()["attach_refused"], "the deadline")
    assert stranger.hear() is None


def test_a_silent_lender_does_not_stall_the_mover(pair: Pair) -> None:
    """One lender accepts nothing; posts to another one still run."""
    blackhole = pair.side(0xDEAD)
    silent = blackhole.transport.connect(blackhole.transport.descriptor(), 0xDEAD)
    descriptor = blackhole.transport.descriptor()
    pair.sides.remove(blackhole)  # is not served any more
    pair.poster.transport.connect(descriptor, pair.poster.epoch)
    peer = pair.attach()
    post = pair.poster.transport.write(peer, [1], [1], pair.grant())
    assert pair.outcome(post).name == "PLACED"
    blackhole.transport.disconnect(silent)
    blackhole.transport.close_all()


def _memory(seals: int, pages: int) -> int:
    fd = os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pages * PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("seals", "pages", "promised", "said"),
    [
        (0, PAGES, PAGES, "not sealed"),
        (SEALS, PAGES - 1, PAGES, "were promised"),
        (SEALS, PAGES + 1, PAGES + 1, "differs from the lender's descriptor"),
        (SEALS | fcntl.F_SEAL_WRITE, PAGES, PAGES, "bad hand-shake"),
    ],
)
def test_the_mover_maps_only_memory_that_cannot_kill_it(
    pair: Pair, tmp_path: Path, seals: int, pages: int, promised: int, said: str
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "x"))
    listener.listen(1)
    descriptor = wire.Descriptor("shm", str(tmp_path / "x"), b"token", 0xE, 0, PAGES, PAGE_BYTES)
    pair.poster.transport.connect(msgspec.msgpack.encode(descriptor), pair.poster.epoch)
    mover, _ = listener.accept()
    mover.settimeout(60)
    assert mover.recv(1000)
    assert wire.send(mover, wire.Challenge(b"nonce"))
    assert mover.recv(1000) == msgspec.msgpack.encode(wire.Answer(b"nonce"))
    fd = _memory(seals, pages)
    assert wire.send(mover, wire.Memory(1, 0, promised, PAGE_BYTES), (fd,))
    (lost,) = pair.until(lambda: pair.poster.lost, "the refusal")
    assert lost.peer_epoch == 0xE and said in lost.reason
    os.close(fd)
    post = pair.poster.transport.write(pair.attach(), [1], [1], pair.grant())
    assert pair.outcome(post).name == "PLACED", "the mover lives on for others"


def test_the_alarm_rings_at_its_time_and_is_taken_back() -> None:
    watch = Watch()
    watch.alarm(time.monotonic() + 0.02)
    assert select.select([watch], [], [], 30)[0]
    watch.alarm(None)
    assert not select.select([watch], [], [], 0)[0]
    watch.alarm(time.monotonic() - 5)
    assert select.select([watch], [], [], 30)[0]
    watch.flag(True)
    watch.alarm(None)
    assert select.select([watch], [], [], 0)[0]
    watch.flag(False)
    assert not select.select([watch], [], [], 0)[0]
    watch.close()
