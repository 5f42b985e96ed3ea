"""The router's sockets: one registry that workers report to, one link to each worker's control socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from quiesce.channel import AsyncLink, AsyncListener, KeyPair, KeyRing, LinkEvent, Received, start_authenticator
from quiesce.core.messages import Register, Wire
from quiesce.router.registry import Worker

log = logging.getLogger(__name__)

KEY_NAME = "router"


class Hears(Protocol):
    """Whoever acts on what the sockets bring; called in the event loop."""

    def from_registry(self, received: Received) -> Wire | None:
        """Returns what to answer."""

    def from_worker(self, worker: Worker, message: Wire) -> None: ...

    def link_changed(self, worker: Worker, up: bool) -> None: ...


class Links:
    """Make it inside the running loop. keys: folder with `router.key` and `ring/` of public keys.

    Raises OSError or ValueError when the keys cannot be read, zmq.ZMQError when `bind` cannot be had.
    """

    def __init__(self, bind: str, keys: Path, hears: Hears) -> None:
        self._keys = KeyPair.load(keys / f"{KEY_NAME}.key")
        self._hears = hears
        self._context: zmq.Context[Any] = zmq.Context()
        self._ring = KeyRing(keys / "ring")
        self._owners: dict[str, str] = {}  # key -> name, as the ring had it when it was last read
        self.strangers = 0  # registrations under a name that is not the key's
        self._authenticator = start_authenticator(self._context, self._ring)
        self._links: dict[int, tuple[AsyncLink, asyncio.Task[None]]] = {}
        self.malformed = 0  # from links that are closed by now
        try:
            self._registry = AsyncListener(self._context, bind, self._keys)
        except zmq.ZMQError:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._registry.endpoint
        self._listening = self._spawn(self._listen(), "registry")

    def connect(self, worker: Worker) -> None:
        address = worker.latest.address

        def changed(event: LinkEvent) -> None:
            self._hears.link_changed(worker, event is LinkEvent.UP)

        try:
            link = AsyncLink(self._context, address.endpoint, address.public_key, self._keys, changed)
        except (zmq.ZMQError, ValueError) as error:
            log.error("cannot connect to worker %s at %s: %s", address.name, address.endpoint, error)
            return
        task = self._spawn(self._hear(link, worker), f"hear {address.name}")
        self._links[address.epoch] = (link, task)

    def send(self, worker: Worker, message: Wire) -> bool:
        """False: not sent, the worker cannot be reached just now."""
        entry = self._links.get(worker.epoch)
        return entry is not None and entry[0].send(message)

    def disconnect(self, worker: Worker) -> None:
        entry = self._links.pop(worker.epoch, None)
        if entry is not None:
            link, task = entry
            task.cancel()
            self.malformed += link.malformed
            link.close()

    def counters(self) -> dict[str, int]:
        arrivals = self._registry.counts.arrivals
        ends = [self._registry, *(link for link, _ in self._links.values())]
        return {
            "malformed_messages": self.malformed + sum(end.malformed for end in ends),
            "refused_keys": self._authenticator.refused,
            "registrations_misnamed": self.strangers,
            "connections": arrivals.accepted,
            **{f"handshakes_failed:{kind}": count for kind, count in arrivals.failed().items()},
        }

    def close(self) -> None:
        self._listening.cancel()
        for link, task in self._links.values():
            task.cancel()
            link.close()
        self._links.clear()
        self._registry.close()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _listen(self) -> None:
        while True:
            for received in await self._registry.receive():
                if isinstance(received.message, Register) and not self._owns(received):
                    continue
                answer = self._guarded(self._hears.from_registry, received)
                if answer is not None:
                    self._registry.send(received.sender, answer)

    def _owns(self, received: Received) -> bool:
        """Whether the key that speaks is on the ring under the name that it registers. Whoever has another worker's
        place in mind needs that worker's key."""
        assert isinstance(received.message, Register)
        name = received.message.address.name
        if self._owners.get(received.user) == name:
            return True
        self._owners = self._ring.names()  # keys come and go
        if self._owners.get(received.user) == name:
            return True
        self.strangers += 1
        log.warning("a registration as %s came with a key that is not %s.pub: refused", name[:40], name[:40])
        return False

    async def _hear(self, link: AsyncLink, worker: Worker) -> None:
        while True:
            for message in await link.receive():
                self._guarded(self._hears.from_worker, worker, message)

    @staticmethod
    def _guarded(handle: Callable[..., Wire | None], *arguments: Any) -> Wire | None:
        try:
            return handle(*arguments)
        except Exception:  # one message must not end the hearing of all others
            log.exception("a message could not be handled")
            return None

    @staticmethod
    def _spawn(work: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(_report)
        return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the router no longer hears %s: %r", task.get_name(), error)
