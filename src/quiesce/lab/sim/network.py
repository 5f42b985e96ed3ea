"""A modelled network under the control channel: loss, copies, other orders, delays, partitions, broken connections.

`SimListener` and `SimLink` stand where the product has its ZeroMQ ends. What decode and prefill say to each other is
carried like datagrams, and reaches whoever lives at the address *now*, also when it was said to its predecessor.
What the router and the workers say is carried in order and lost only with the connection, as their protocol needs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quiesce.channel.frames import Counts, LinkEvent, Received
from quiesce.core.messages import Wire
from quiesce.lab.sim.clock import Loop

if TYPE_CHECKING:
    from quiesce.lab.sim.world import Noise

CONNECT = 0.002  # seconds
RETRY = 0.1
BREAK = 0.002  # until a peer's death is noticed at the other end of a connection


class Owner:
    """Whoever has sockets: woken when one of them has something."""

    name: str
    alive: bool

    def wake(self) -> None:
        raise NotImplementedError


class SimKeys:
    """Whoever speaks is known by name, as by a key."""

    def __init__(self, name: str) -> None:
        self.public = name


class Network:
    def __init__(self, loop: Loop, rng: random.Random, noise: Noise) -> None:
        self.loop = loop
        self.rng = rng
        self.noise = noise
        self.owner: Owner  # of the sockets that are made next
        self.listeners: dict[str, SimListener] = {}  # by endpoint
        self.links: dict[bytes, SimLink] = {}  # by what the listener calls them
        self.cut: dict[frozenset[str], float] = {}  # two names -> until when nothing passes between them
        self.lost = self.copied = self.sent = 0
        self.heard: Callable[[str, str, Wire], None] | None = None  # (speaker, hearer, message), for the story

    def partition(self, one: str, other: str, until: float) -> None:
        self.cut[frozenset((one, other))] = until

    def healed_at(self, one: str, other: str) -> float:
        """When something sent now can pass."""
        if not self.cut:
            return self.loop.now
        return max(self.loop.now, self.cut.get(frozenset((one, other)), 0.0))

    def datagram(self, source: str, target: str, deliver: Callable[[Wire], None], message: Wire) -> None:
        self.sent += 1
        noise, rng = self.noise, self.rng
        fate = rng.random()
        if fate < noise.loss:
            self.lost += 1
            return
        begin = self.healed_at(source, target)
        if begin > self.loop.now and fate < 0.5:
            self.lost += 1
            return
        copies = 1
        if fate > 1.0 - noise.copies:
            self.copied += 1
            copies = 2
        for _ in range(copies):
            delay = noise.delay * (0.5 + rng.random())
            if rng.random() < noise.late:
                delay += noise.lateness * rng.random() ** 2
            self.loop.at(begin + delay, deliver, message)

    def connect(self, link: SimLink) -> None:
        if link.closed or link.connected is not None:
            return
        listener = self.listeners.get(link.endpoint)
        if listener is None or self.healed_at(link.owner.name, listener.owner.name) > self.loop.now:
            if listener is None:
                link.change(LinkEvent.DOWN)
            self.loop.after(RETRY * (1 + self.rng.random()), self.connect, link)
            return
        link.connected = listener
        listener.links.append(link)
        link.fifo = self.loop.now
        link.change(LinkEvent.UP)

    def broken(self, link: SimLink, listener: SimListener) -> None:
        if link.connected is listener:
            link.connected = None
            link.change(LinkEvent.DOWN)
            self.loop.after(RETRY, self.connect, link)


class SimListener:
    """As `quiesce.channel.Listener`."""

    malformed = dropped = 0
    counts = Counts()
    socket = monitor = None

    def __init__(self, net: Network, endpoint: str, keys: SimKeys) -> None:
        self.net = net
        self.owner = net.owner
        self.endpoint = endpoint
        self.keys = keys
        self.inbox: deque[Received] = deque()
        self.links: list[SimLink] = []
        self.closed = False
        net.listeners[endpoint] = self

    def receive(self, limit: int = 256) -> list[Received]:
        if not self.inbox:
            return []
        found, self.inbox = list(self.inbox), deque()
        return found

    def put(self, received: Received) -> None:
        if self.closed:
            return
        if self.net.heard is not None:
            self.net.heard(received.user, self.owner.name, received.message)
        self.inbox.append(received)
        self.owner.wake()

    def send(self, to: bytes, message: Wire) -> bool:
        link = self.net.links.get(to)
        if link is None or link.closed:
            return False
        if link.datagrams:
            self.net.datagram(self.owner.name, link.owner.name, link.put, message)
            return True
        if link.connected is not self:
            return False
        self.net.loop.at(link.turn(self.owner.name), link.put_from, self, message)
        return True

    def close(self, linger_ms: int = 0) -> None:
        if self.closed:
            return
        self.closed = True
        if self.net.listeners.get(self.endpoint) is self:
            del self.net.listeners[self.endpoint]
        for link in self.links:
            self.net.loop.after(BREAK * (0.5 + self.net.rng.random()), self.net.broken, link, self)


class SimLink:
    """As `quiesce.channel.Link`. `datagrams`: between decode and prefill."""

    malformed = dropped = 0
    socket = monitor = None
    refused = False

    def __init__(self, net: Network, endpoint: str, datagrams: bool) -> None:
        self.net = net
        self.owner = net.owner
        self.endpoint = endpoint
        self.datagrams = datagrams
        self.ident = f"{self.owner.name}@{id_of(self.owner):x}>{endpoint}".encode()
        self.inbox: deque[Wire] = deque()
        self.changes: deque[LinkEvent] = deque()
        self.connected: SimListener | None = None
        self.closed = False
        self.fifo = 0.0  # reliable ones: nothing arrives before this
        self._told: LinkEvent | None = None  # the newest change, read or not
        self._current: LinkEvent | None = None  # as of the last `state_changes()`
        net.links[self.ident] = self
        net.loop.after(CONNECT, net.connect, self)

    @property
    def is_up(self) -> bool:
        return self._current is LinkEvent.UP

    @property
    def is_down(self) -> bool:
        return self._current is LinkEvent.DOWN

    def again(self) -> None:
        self.net.connect(self)

    def change(self, event: LinkEvent) -> None:
        if self.closed or self._told is event:
            return
        self._told = event
        self.changes.append(event)
        self.owner.wake()

    def state_changes(self, limit: int = 256) -> list[LinkEvent]:
        if not self.changes:
            return []
        found, self.changes = list(self.changes), deque()
        self._current = found[-1]
        return found

    def receive(self, limit: int = 256) -> list[Wire]:
        if not self.inbox:
            return []
        found, self.inbox = list(self.inbox), deque()
        return found

    def turn(self, source: str) -> float:
        """When the next message of an ordered connection arrives."""
        listener = self.connected
        other = self.owner.name if listener is None or source != self.owner.name else listener.owner.name
        begin = self.net.healed_at(source, other)
        self.fifo = max(self.fifo, begin + self.net.noise.ordered * (0.5 + self.net.rng.random()))
        return self.fifo

    def send(self, message: Wire) -> bool:
        if self._current is LinkEvent.DOWN or self.connected is None or self.closed:
            return False
        if self.datagrams:
            self.net.datagram(self.owner.name, self.connected.owner.name, self._arrive, message)
        else:
            self.net.loop.at(self.turn(self.owner.name), self._arrive_in_order, self.connected, message)
        return True

    def _arrive(self, message: Wire) -> None:
        """At whoever listens there now."""
        listener = self.net.listeners.get(self.endpoint)
        if listener is not None:
            listener.put(Received(self.ident, self.owner.name, message))

    def _arrive_in_order(self, listener: SimListener, message: Wire) -> None:
        if self.connected is listener and not self.closed:
            listener.put(Received(self.ident, self.owner.name, message))

    def put(self, message: Wire) -> None:
        """To this owner's newest connection there."""
        link = self.net.links.get(self.ident)
        if link is None or link.closed or not link.owner.alive:
            return
        if self.net.heard is not None:
            self.net.heard(self.endpoint, self.owner.name, message)
        link.inbox.append(message)
        link.owner.wake()

    def put_from(self, listener: SimListener, message: Wire) -> None:
        if self.connected is listener and not self.closed:
            self.inbox.append(message)
            self.owner.wake()

    def close(self) -> None:
        self.closed = True
        if self.connected is not None and self in self.connected.links:
            self.connected.links.remove(self)
        self.connected = None
        if self.net.links.get(self.ident) is self:
            del self.net.links[self.ident]


def id_of(owner: Any) -> int:
    return int(getattr(owner, "epoch", 0))
