"""A worker's standing with the router: it registers again and again, and hears at once when the router dies."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from quiesce.channel import KeyPair, Link, LinkEvent
from quiesce.core.messages import Register, Registered

log = logging.getLogger("quiesce.worker")

HEARTBEAT = 0.5  # seconds


class Registration:
    """`router_epoch` is the router's own, None while there is none."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, router_key: str, keys: KeyPair) -> None:
        self.link = Link(context, endpoint, router_key, keys)
        self.router_epoch: int | None = None

    def beat(self, register: Register) -> None:
        if self.link.refused:
            log.warning("the router at %s does not know this worker's key; asking again", self.link.endpoint)
            self.link.again()
        self.link.send(register)

    def turn(self) -> int | None:
        """Reads what has arrived. Returns the epoch of a router that is gone, else None."""
        gone = None
        for change in self.link.state_changes():
            if change is LinkEvent.DOWN and self.router_epoch is not None:
                gone, self.router_epoch = self.router_epoch, None
        for message in self.link.receive():
            if isinstance(message, Registered):
                if self.router_epoch not in (None, message.router_epoch):
                    gone = self.router_epoch
                self.router_epoch = message.router_epoch
        return gone

    def close(self) -> None:
        self.link.close()
