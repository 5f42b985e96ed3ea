"""A decode worker's sessions: how long a prefill worker's transport may take to attach before requests give up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Address
from quiesce.core.session import Handshake
from quiesce.roles import prefill_peers
from quiesce.roles.prefill_peers import UNREACHABLE, PrefillPeer, PrefillPeers
from quiesce.roles.silence import ATTACH_LEAST, PAUSE

FINGERPRINT = Fingerprint("m", "w", "float32", "page-major/row", 16, 4096, 2, 2, 16)
HOLD = 2.0  # a hold timeout that is shorter than what a mover or an agent takes to start on a busy machine


def test_a_transport_gets_some_seconds_to_attach_however_short_the_hold_timeout_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, attached = [100.0], [False]
    monkeypatch.setattr(prefill_peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ends = SimpleNamespace(generation=lambda epoch: 1 if attached[0] else None)
    nothing = cast(Any, None)
    peers = PrefillPeers(nothing, nothing, nothing, 0xD, FINGERPRINT, cast(Any, ends), HOLD)
    handshake = Handshake(0xD, 0, FINGERPRINT, lambda: 1)
    handshake.peer = 0xB
    link = cast(Any, SimpleNamespace(is_down=False))
    peer = PrefillPeer(Address("prefill-0", 0xB, "ipc:///nowhere", "key"), link, handshake, opened=now[0])
    now[0] += ATTACH_LEAST - 0.1
    assert peers.hopeless(peer) is None
    now[0] += 0.2
    assert peers.hopeless(peer) == "prefill prefill-0 has not attached to write here for 15.1 s"
    attached[0] = True
    assert peers.hopeless(peer) is None
    attached[0] = False  # its mover died: the clock starts again
    now[0] += ATTACH_LEAST - 0.1
    assert peers.hopeless(peer) is None


class SlowLink:
    """To a process that accepted and was stopped then."""

    is_up = False
    is_down = False

    def receive(self) -> list[Any]:
        return []

    def state_changes(self) -> list[Any]:
        return []


def test_a_peer_that_breaks_off_a_handshake_after_a_stop_has_all_the_time_to_be_reached_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(prefill_peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nothing, link = cast(Any, None), SlowLink()
    peers = PrefillPeers(nothing, nothing, nothing, 0xD, FINGERPRINT, nothing, patience=30.0)
    handshake = Handshake(0xD, 0, FINGERPRINT, lambda: 1)
    address = Address("prefill-0", 0xB, "ipc:///nowhere", "key")
    peer = peers.peers[0xB] = PrefillPeer(address, cast(Any, link), handshake, opened=now[0])

    def turn_for(seconds: float) -> None:
        for _ in range(int(seconds / (PAUSE / 2))):
            now[0] += PAUSE / 2
            peers.turn()

    turn_for(2 * UNREACHABLE)
    assert peers.hopeless(peer) is None, "it is there and silent"
    link.is_down = True
    turn_for(UNREACHABLE)
    assert peers.hopeless(peer) is None, "it has only just broken off"
    turn_for(2 * PAUSE)
    assert peers.hopeless(peer) is not None, "nobody is there"
    link.is_down = False
    peers.turn()
    assert peers.hopeless(peer) is None


@pytest.mark.parametrize("down", [True, False], ids=["not reached", "silent"])
def test_a_pause_of_our_own_is_no_silence_of_a_peer_that_is_being_reached(
    monkeypatch: pytest.MonkeyPatch, down: bool
) -> None:
    """Who was stopped for longer than a peer may take to answer has not heard it, and blames nobody for that."""
    now = [100.0]
    monkeypatch.setattr(prefill_peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nothing, link = cast(Any, None), SlowLink()
    peers = PrefillPeers(nothing, nothing, nothing, 0xD, FINGERPRINT, nothing, patience=HOLD)
    handshake = Handshake(0xD, 0, FINGERPRINT, lambda: 1)
    address = Address("prefill-0", 0xB, "ipc:///nowhere", "key")
    peer = peers.peers[0xB] = PrefillPeer(address, cast(Any, link), handshake, opened=now[0])
    link.is_down = down
    peers.turn()
    now[0] += 2 * UNREACHABLE
    peers.turn()
    assert peers.hopeless(peer) is None
    for _ in range(2 * int(UNREACHABLE / PAUSE) + 2):
        now[0] += PAUSE / 2
        peers.turn()
    assert peers.hopeless(peer) is not None, "it has had its time since"
