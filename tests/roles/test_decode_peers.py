"""A prefill worker's sessions: what was posted for a decode worker is heard of whatever connection it greets over."""

from __future__ import annotations

from typing import Any, cast

from quiesce.channel import Listener, Received
from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Confirm, Hello, Welcome
from quiesce.core.session import Handshake
from quiesce.roles.decode_peers import DecodePeers
from quiesce.transfer.interface import Peer, Transport

D, P = 0xD, 0xB
FINGERPRINT = Fingerprint("m", "w", "float32", "page-major/row", 16, 4096, 2, 2, 16)


class Connections:
    """As far as sessions ask a transport: each descriptor is a connection, `drained` what can be proven of them."""

    def __init__(self) -> None:
        self.made: dict[bytes, Peer] = {}
        self.drained: set[Peer] = set()
        self.ended: list[Peer] = []

    def reply(self, peer_epoch: int, descriptor: bytes, *, pull: bool) -> bytes:
        return b""

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        return self.made.setdefault(descriptor, Peer(D, len(self.made) + 1))

    def disconnect(self, peer: Peer) -> None:
        self.ended.append(peer)

    def drain(self, peer: Peer) -> bool:
        return peer in self.drained


class Sockets:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, to: bytes, message: Any) -> bool:
        self.said.append(message)
        return True


def test_a15_a_session_over_a_new_connection_still_owes_what_the_old_one_posted() -> None:
    """The control connection breaks and comes again with another descriptor: the posts on the transport's old one are
    in doubt, and asking the new one alone would have called them drained."""
    sockets, transport = Sockets(), Connections()
    peers = DecodePeers(cast(Listener, sockets), cast(Transport, transport), P, FINGERPRINT, lambda epoch: True)
    for sender, descriptor in ((b"one", b"old"), (b"two", b"new")):
        decode = Handshake(D, 0, FINGERPRINT, iter(range(1, 99)).__next__)
        hello: Hello = decode.hello(descriptor)
        peers.session(Received(sender, "key", hello), 0)
        welcome = sockets.said[-1]
        assert isinstance(welcome, Welcome)
        confirm = decode.on_welcome(welcome)
        assert isinstance(confirm, Confirm)
        peers.session(Received(sender, "key", confirm), 0)
    old, new = transport.made[b"old"], transport.made[b"new"]
    assert transport.ended == [old], "nothing more is posted there"
    transport.drained = {new}
    assert not peers.drained(D), "what was posted on the old one may still land"
    transport.drained = {new, old}
    assert peers.drained(D)
