from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from quiesce.channel import KeyPair, KeyRing, Link, LinkEvent, Listener


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Polls a real condition until it is truthy; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.005)


@dataclass
class Bench:
    """A context with an authenticator, whose ring knows `client` and nobody else."""

    context: zmq.Context[Any]
    folder: Path
    ring: KeyRing
    server: KeyPair = field(default_factory=KeyPair.generate)
    client: KeyPair = field(default_factory=KeyPair.generate)
    ends: list[Listener | Link] = field(default_factory=list)

    def listen(self, bind: str = "tcp://127.0.0.1:*") -> Listener:
        listener = Listener(self.context, bind, self.server)
        self.ends.append(listener)
        return listener

    def link(self, endpoint: str, keys: KeyPair | None = None, server: str | None = None) -> Link:
        link = Link(self.context, endpoint, server or self.server.public, keys or self.client)
        self.ends.append(link)
        return link

    def link_up(self, endpoint: str) -> Link:
        link = self.link(endpoint)
        wait_for(lambda: LinkEvent.UP in link.state_changes())
        return link
