"""A worker's standing with the router: it registers again and again, and hears at once when the router dies."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from quiesce.channel import KeyPair, Link, LinkEvent, Listener
from quiesce.core.messages import Register, Registered
from quiesce.engine.errors import EngineError
from quiesce.roles.settings import WorkerSettings

log = logging.getLogger("quiesce.worker")

HEARTBEAT = 0.5  # seconds


def own_keys(settings: WorkerSettings) -> KeyPair:
    """Raises EngineError for keys that cannot be used."""
    try:
        return KeyPair.load(settings.keys / f"{settings.name}.key")
    except (OSError, ValueError) as error:
        raise EngineError(f"--keys: {error}") from error


def control_socket(settings: WorkerSettings, context: zmq.Context[Any], keys: KeyPair) -> Listener:
    """Where router and peers speak to this worker. Raises EngineError for an address that cannot be had."""
    own = f"ipc://{settings.run_dir}/{settings.name}-{settings.epoch:016x}.sock"
    try:
        return Listener(context, settings.bind or own, keys)
    except zmq.ZMQError as error:
        raise EngineError(f"--bind: cannot listen at {settings.bind or own}: {error}") from error


class Registration:
    """`router_epoch` is the router's own, None while there is none. `limit`: what all workers have agreed on, as that
    router says; 0: nothing."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, router_key: str, keys: KeyPair) -> None:
        self.link = Link(context, endpoint, router_key, keys)
        self.router_epoch: int | None = None
        self.limit = 0

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
                gone, self.router_epoch, self.limit = self.router_epoch, None, 0
        for message in self.link.receive():
            if isinstance(message, Registered):
                if self.router_epoch not in (None, message.router_epoch):
                    gone = self.router_epoch
                self.router_epoch, self.limit = message.router_epoch, message.limit
        return gone

    def close(self) -> None:
        self.link.close()
