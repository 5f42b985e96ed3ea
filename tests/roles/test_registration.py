"""A worker whose key comes to the ring late gets in without a restart."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from quiesce.channel import KeyPair, KeyRing, Listener, start_authenticator
from quiesce.core.fingerprint import Fingerprint, Limits
from quiesce.core.messages import Address, Register, Registered
from quiesce.roles.registration import Registration

FINGERPRINT = Fingerprint("m", "w", "float32", "l", 16, 1024, 2, 2, 16)


def test_a_key_that_is_added_after_a_refusal_opens_the_registry(tmp_path: Path) -> None:
    ring, router, mine = KeyRing(tmp_path / "ring"), KeyPair.generate(), KeyPair.generate()
    ring.add("router", router.public)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = start_authenticator(context, ring)
    registry = Listener(context, "tcp://127.0.0.1:*", router)
    registration = Registration(context, registry.endpoint, router.public, mine)
    register = Register(
        role="prefill",
        address=Address("prefill-0", 5, "ipc:///nowhere", mine.public),
        fingerprint=FINGERPRINT,
        limits=Limits(64, 64, 4),
        progress=0,
        queued=0,
        running=0,
    )
    try:
        limit = time.monotonic() + 60
        while not registration.link.refused and time.monotonic() < limit:
            registration.turn()
            registration.link.monitor.poll(20)
        assert registration.link.refused
        ring.add("prefill-0", mine.public)
        while registration.router_epoch is None and time.monotonic() < limit:
            registration.beat(register)
            registration.turn()
            for received in registry.receive():
                registry.send(received.sender, Registered(9))
            registry.socket.poll(50)
        assert registration.router_epoch == 9
    finally:
        registration.close()
        registry.close()
        authenticator.stop()
        context.term()
