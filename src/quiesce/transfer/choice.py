"""Several engines behind one interface: each pair of processes uses the best one that both have.

The protocol rides on the handshake. HELLO's descriptor is an `Offers`: what this decode engine has, best first, with
each engine's own descriptor, and which host it is on. The prefill engine picks the first of its own order that is
offered and can work between the two: shm only where both pools are memory of one host. WELCOME says the `Pick`. A
peer's epoch keeps its engine for good, so that a later HELLO only refreshes that engine's descriptor. With one engine
on either side it is the same protocol, and it is where two deployments that do not fit are told so.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.interface import (
    Access,
    Arena,
    Capabilities,
    FenceProof,
    Peer,
    PeerLost,
    Post,
    Region,
    Transport,
)
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

MAX_BOUND = 4096  # epochs whose engine is remembered; one that is in use is never forgotten
MAX_UNDRAINED = 4096  # connections that were ended with something that was never shown to have landed
COSTS = ("none", "us", "ms", "disrupts_peer", "disrupts_all")
FENCES = ("page", "peer", "region", "death", "none")  # the narrowest first


class Offer(msgspec.Struct, frozen=True, array_like=True):
    engine: str  # its label
    descriptor: bytes


class Offers(msgspec.Struct, frozen=True, tag=True):
    """`epoch`: whose. `host`: equal where two processes can share memory and see each other die."""

    epoch: int
    host: str
    offers: tuple[Offer, ...]


class Pick(msgspec.Struct, frozen=True, tag=True):
    """`epoch`: of who picked."""

    epoch: int
    engine: str
    why: str
    descriptor: bytes  # in pull: what to read from


_decoder = msgspec.msgpack.Decoder(Offers | Pick)


def this_host() -> str:
    """The machine's boot, the namespace that its process ids are from, and the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def merged(all_caps: Sequence[Capabilities]) -> Capabilities:
    """What can be said before it is known which engine a peer will have. A fence is asked for as narrowly as any of
    them can; a wider proof is a proof all the same. Otherwise the weakest counts."""
    if len(all_caps) == 1:
        return all_caps[0]
    first = all_caps[0]
    return Capabilities(
        name="auto",
        lane=" ".join(caps.label for caps in all_caps),
        push=all(caps.push for caps in all_caps),
        pull=all(caps.pull for caps in all_caps),
        gather=all(caps.gather for caps in all_caps),
        notify=all(caps.notify for caps in all_caps),
        failure_is_terminal=all(caps.failure_is_terminal for caps in all_caps),
        cancels_queued=all(caps.cancels_queued for caps in all_caps),
        blocking_post=any(caps.blocking_post for caps in all_caps),
        drain=first.drain if len({caps.drain for caps in all_caps}) == 1 else "none",
        fence=min((caps.fence for caps in all_caps), key=FENCES.index),
        fence_cost=max((caps.fence_cost for caps in all_caps), key=COSTS.index),
        placed_means="visible" if all(caps.placed_means == "visible" for caps in all_caps) else "accepted",
        measured=all(caps.measured for caps in all_caps),
    )


class Choice(Transport):
    """`engines`: best first."""

    def __init__(self, engines: Sequence[Transport], epoch: int) -> None:
        self._epoch = epoch
        self.caps = merged([engine.caps for engine in engines])
        self._engines = {engine.caps.label: engine for engine in engines}
        self._host = this_host()
        self._bound: dict[int, Transport] = {}  # peer epoch -> its engine
        self._why: dict[int, str] = {}
        self._lent: Counter[int] = Counter()  # peer epoch -> grants that were not withdrawn
        self._peers: dict[int, tuple[Transport, Peer]] = {}  # by the number of ours
        self._numbers: dict[tuple[str, int], Peer] = {}  # (engine, its number) -> ours
        self._posts: dict[tuple[str, int], Post] = {}  # (engine, its post) -> ours
        self._inner: dict[int, Post] = {}  # our post -> the engine's
        self._left: list[Peer] = []
        self._undrained_through = 0  # of what was forgotten by this number it is known only that it was not drained
        self._last = 0
        self._watch = Watch()
        for engine in engines:
            self._watch.add(engine.fileno(), lambda: None)

    def fileno(self) -> int:
        return self._watch.fileno()

    def close_all(self) -> None:
        for engine in self._engines.values():
            engine.close_all()
        self._watch.close()

    def self_test(self) -> list[str]:
        return [f"{label}: {said}" for label, engine in self._engines.items() for said in engine.self_test()]

    def used_up(self) -> str | None:
        return next((why for engine in self._engines.values() if (why := engine.used_up()) is not None), None)

    def counters(self) -> dict[str, int]:
        return {
            f"{label}_{name}": value
            for label, engine in self._engines.items()
            for name, value in engine.counters().items()
        }

    def report(self) -> dict[str, Any]:
        peers = {f"{epoch:016x}": why for epoch, why in self._why.items()}
        return {"engines": [engine.report() for engine in self._engines.values()], "peers": peers}

    # ------------------------------------------------------------ picking

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        bound = None if peer_epoch is None else self._bound.get(peer_epoch)
        engines = self._engines if bound is None else {bound.caps.label: bound}
        offers = tuple(Offer(label, engine.descriptor(peer_epoch)) for label, engine in engines.items())
        return msgspec.msgpack.encode(Offers(self._epoch, self._host, offers))

    def _read(self, descriptor: bytes) -> Offers | Pick:
        try:
            return _decoder.decode(descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"says nothing of transfer engines: {error}") from error

    def _choose(self, theirs: Offers) -> tuple[Transport, Offer, str]:
        offered = {offer.engine: offer for offer in theirs.offers}
        bound = self._bound.get(theirs.epoch)
        near = theirs.host == self._host
        passed = []
        for label, engine in self._engines.items():
            if bound is not None and engine is not bound:
                continue
            if label not in offered:
                passed.append(f"{label} is not offered")
            elif label == "shm" and not near:
                passed.append("shm would need one host, one user and one PID namespace")
            else:
                first = "both are on one host" if label == "shm" else "; ".join(passed) or "the only one here"
                return engine, offered[label], f"{label}: {first}"
        raise ValueError(f"none in common: {', '.join(offered) or 'nothing'} there, {', '.join(self._engines)} here")

    def picks(self) -> tuple[str, ...]:
        """Of the peers in use: which engine each pair has and why, with their number; the most common first."""
        counted = Counter(self._why[epoch] for epoch in self._used())
        return tuple(f"{why} ({n} peer{'s' if n > 1 else ''})" for why, n in counted.most_common())

    def _used(self) -> list[int]:
        """Epochs with a connection, an attachment or a grant. One that is forgotten could prove nothing any more."""
        connected = {peer.epoch for peer in self._numbers.values()}
        return [
            epoch
            for epoch, engine in self._bound.items()
            if epoch in connected or self._lent[epoch] > 0 or engine.generation(epoch) is not None
        ]

    def _make_room(self, peer_epoch: int) -> None:
        """Before anything is made for a new epoch. Raises ValueError where all that are remembered are in use."""
        if peer_epoch in self._bound or len(self._bound) < MAX_BOUND:
            return
        used = {*self._used()}
        oldest = next((epoch for epoch in self._bound if epoch not in used), None)
        if oldest is None:
            raise ValueError(f"{MAX_BOUND} peers are in use already")
        del self._bound[oldest], self._why[oldest], self._lent[oldest]

    def _bind(self, peer_epoch: int, engine: Transport, why: str) -> None:
        if peer_epoch in self._bound:
            return
        self._bound[peer_epoch], self._why[peer_epoch] = engine, why
        log.info("transfers by %s", why, extra={"peer_epoch": f"{peer_epoch:016x}"})

    def reply(self, peer_epoch: int, descriptor: bytes, *, pull: bool = False) -> bytes:
        theirs = self._read(descriptor)
        if not isinstance(theirs, Offers) or theirs.epoch != peer_epoch:
            raise ValueError("it offers no engines of its own")
        engine, offer, why = self._choose(theirs)
        self._make_room(peer_epoch)
        inner = engine.reply(peer_epoch, offer.descriptor, pull=pull)
        self._bind(peer_epoch, engine, why)
        return msgspec.msgpack.encode(Pick(self._epoch, engine.caps.label, why, inner))

    def settle(self, peer_epoch: int, reply: bytes) -> None:
        pick = self._read(reply)
        if not isinstance(pick, Pick) or pick.epoch != peer_epoch:
            raise ValueError("it has picked no engine")
        engine = self._engine_of(pick)
        self._make_room(peer_epoch)
        engine.settle(peer_epoch, pick.descriptor)
        self._bind(peer_epoch, engine, pick.why)

    def _engine_of(self, pick: Pick) -> Transport:
        engine = self._engines.get(pick.engine)
        if engine is None:
            raise ValueError(f"{pick.engine} was picked, which is not here: {', '.join(self._engines)}")
        if self._bound.get(pick.epoch, engine) is not engine:
            raise ValueError(f"it changes from {self._bound[pick.epoch].caps.label} to {pick.engine}")
        return engine

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        """To who sent a HELLO (`Offers`) in push, or a WELCOME (`Pick`) in pull."""
        theirs = self._read(descriptor)
        if isinstance(theirs, Pick):
            engine, inner = self._engine_of(theirs), theirs.descriptor
            self._make_room(theirs.epoch)
            self._bind(theirs.epoch, engine, theirs.why)
        else:
            engine, offer, _ = self._choose(theirs)
            inner = offer.descriptor
        return self._peer(engine, engine.connect(inner, own_epoch))

    def _peer(self, engine: Transport, inner: Peer) -> Peer:
        key = (engine.caps.label, inner.number)
        if key not in self._numbers:
            self._last += 1
            self._numbers[key] = Peer(inner.epoch, self._last)
            self._peers[self._last] = (engine, inner)
        return self._numbers[key]

    # ------------------------------------------------------------ the side whose memory is touched

    def register(self, arena: Arena) -> Region:
        regions = [engine.register(arena) for engine in self._engines.values()]
        if len(set(regions)) != 1:
            raise ValueError(f"{', '.join(self._engines)} number their regions differently: {regions}")
        return regions[0]

    def generation(self, peer_epoch: int) -> int | None:
        engine = self._bound.get(peer_epoch)
        return None if engine is None else engine.generation(peer_epoch)

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        engine = self._bound.get(peer_epoch)
        lent = None if engine is None else engine.lend(peer_epoch, pages, access=access, generation=generation)
        self._lent[peer_epoch] += lent is not None
        return lent

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        engine = self._bound.get(peer_epoch)
        if engine is not None:
            self._lent[peer_epoch] -= 1
            engine.withdraw(peer_epoch, generation)

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        engine = self._bound.get(peer_epoch)
        return None if engine is None else engine.fence(peer_epoch, generation, pages)

    def gone(self, peer_epoch: int) -> FenceProof | None:
        engine = self._bound.get(peer_epoch)
        return None if engine is None else engine.gone(peer_epoch)

    def consume_barrier(self, pages: Sequence[int]) -> None:
        for engine in self._engines.values():
            engine.consume_barrier(pages)

    # ------------------------------------------------------------ both sides

    def events(self) -> list[PeerLost]:
        self._watch.turn()
        return [lost for engine in self._engines.values() for lost in engine.events()]

    # ------------------------------------------------------------ the side that posts

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        engine, inner = self._peers[peer.number]
        return self._posted(engine, peer, engine.write(inner, src_pages, dst_pages, grant))

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        engine, inner = self._peers[peer.number]
        return self._posted(engine, peer, engine.read(inner, dst_pages, src_pages, grant))

    def _posted(self, engine: Transport, peer: Peer, inner: Post) -> Post:
        self._last += 1
        post = Post(self._last, peer)
        self._posts[engine.caps.label, inner.id] = post
        self._inner[post.id] = inner
        return post

    def poll(self) -> list[tuple[Post, Outcome]]:
        self._watch.turn()
        ended = []
        for label, engine in self._engines.items():
            for inner, outcome in engine.poll():
                post = self._posts.pop((label, inner.id), None)
                if post is not None:  # else posting it raised, and that was its outcome
                    del self._inner[post.id]
                    ended.append((post, outcome))
        return ended

    def try_cancel(self, post: Post) -> bool:
        inner = self._inner.get(post.id)
        if inner is None:
            return False
        engine, _ = self._peers[post.peer.number]
        if not engine.try_cancel(inner):
            return False
        del self._inner[post.id], self._posts[engine.caps.label, inner.id]
        return True

    def drain(self, peer: Peer) -> bool:
        known = self._peers.get(peer.number)
        return peer.number > self._undrained_through if known is None else known[0].drain(known[1])

    def disconnect(self, peer: Peer) -> None:
        if peer.number not in self._peers:
            return
        engine, inner = self._peers[peer.number]
        engine.disconnect(inner)
        if peer not in self._left:
            self._left.append(peer)
        for each in list(self._left):  # what is asked about them later is only whether they are drained
            engine, inner = self._peers[each.number]
            if engine.drain(inner):
                self._let_go(each)
        while len(self._left) > MAX_UNDRAINED:
            self._undrained_through = max(self._undrained_through, self._left[0].number)
            self._let_go(self._left[0])

    def _let_go(self, peer: Peer) -> None:
        self._left.remove(peer)
        engine, inner = self._peers.pop(peer.number)
        del self._numbers[engine.caps.label, inner.number]
