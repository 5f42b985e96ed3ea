"""Control messages over ZeroMQ: CURVE keys on every socket, bounded queues, sends that never wait."""

from quiesce.channel.async_sockets import AsyncLink, AsyncListener
from quiesce.channel.frames import LinkEvent, Received
from quiesce.channel.keys import Authenticator, KeyPair, KeyRing, start_authenticator
from quiesce.channel.sockets import Link, Listener

__all__ = [
    "AsyncLink",
    "AsyncListener",
    "Authenticator",
    "KeyPair",
    "KeyRing",
    "Link",
    "LinkEvent",
    "Listener",
    "Received",
    "start_authenticator",
]
