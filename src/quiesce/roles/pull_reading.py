"""Decode's half of a pull: asks prefill to compute, reads the pages it lends, checks that they were lent, commits."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quiesce.core.admission import pages_for
from quiesce.core.borrowing import DrainSaid
from quiesce.core.machine import Action, CheckGrant, Closed, Committed, Lost, Post, TryDrain
from quiesce.core.messages import HandOff, Leg, Ping, Standing, TransferId
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import Ask
from quiesce.engine.engine import Engine
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.grant_checks import GrantChecks
from quiesce.roles.legs import WorkerLeg
from quiesce.roles.posts import Posts
from quiesce.roles.settings import WorkerSettings
from quiesce.transfer.interface import Peer, Transport

READ_WINDOW = 4


class Sources:
    """The transport's connections to the prefill workers whose pages are read, by their epoch."""

    def __init__(self, transport: Transport, epoch: int) -> None:
        self._transport = transport
        self._epoch = epoch
        self._connected: dict[int, list[Peer]] = {}  # the newest last
        self._dropped: dict[int, list[Peer]] = {}  # of sources that died: what was read from them may be in doubt

    def descriptor(self, peer_epoch: int) -> bytes:
        return self._transport.descriptor(peer_epoch)

    def settle(self, peer_epoch: int, reply: bytes) -> None:
        """The same descriptor gives the same connection; posts on an earlier one have still to be heard of."""
        peer = self._transport.connect(reply, self._epoch)
        if peer.epoch != peer_epoch:  # reads are fenced by the epoch of whom they are from
            self._transport.disconnect(peer)
            raise ValueError(f"its descriptor leads to another process ({peer.epoch:016x})")
        known = self._connected.get(peer_epoch, [])
        if peer not in known:
            for old in known:
                self._transport.disconnect(old)
            unheard = [old for old in known if not self._transport.drain(old)]
            self._connected[peer_epoch] = [*unheard, peer]

    def generation(self, peer_epoch: int) -> int | None:
        """Connections are numbered, so the newest one's number rises."""
        peer = self.peer(peer_epoch)
        return None if peer is None else peer.number

    def peer(self, peer_epoch: int) -> Peer | None:
        known = self._connected.get(peer_epoch)
        return known[-1] if known else None

    def drained(self, peer_epoch: int) -> bool:
        """Whether everything that was ever read from it has landed or never will."""
        known = [*self._dropped.get(peer_epoch, []), *self._connected.get(peer_epoch, [])]
        return bool(known) and all(self._transport.drain(peer) for peer in known)

    def drop(self, peer_epoch: int) -> None:
        for peer in self._connected.pop(peer_epoch, []):
            self._dropped.setdefault(peer_epoch, []).append(peer)
            self._transport.disconnect(peer)


class PullDecodeWorker(DecodeWorker):
    lender: PullReader  # it lends its own pages to its own reads

    def __init__(self, settings: WorkerSettings, engine: Engine, transport: Transport) -> None:
        super().__init__(settings, engine, transport)
        self.posts = Posts(self.tell)
        self.checks = GrantChecks(self.peers.send, self.timers)

    # ------------------------------------------------------------ where it differs from push

    def machine(self, transport: Transport) -> PullReader:
        return PullReader(
            self.epoch,
            self.ledger,
            window=READ_WINDOW,
            batch=self.settings.max_transfer_pages,
            expiry=self.settings.on_hold_expiry,
            page_fence=transport.caps.fence == "page",
        )

    def ends(self, transport: Transport) -> Sources:
        self.sources = Sources(transport, self.epoch)
        return self.sources

    def begin(self, tid: TransferId, prefill: int, remaining_ms: int) -> None:
        self.tell(Ask(tid, remaining_ms))

    def probe(self, leg: WorkerLeg) -> bool:
        """Through pages, batch and engine: there is nothing to read where nobody else is."""
        tid = self.local(pages_for(len(leg.start.token_ids), self.settings.page_size))
        if tid is not None:
            self.generation.admit(leg, tid)
            self.generation.sequence(tid, computed=0)
        return tid is not None

    def _probed(self, message: HandOff | Ping) -> None:
        """No probe has another half here."""

    def reading(self) -> tuple[int, ...]:
        return self.lender.reading()

    def hear(self, message: HandOff, speaker: int) -> None:
        if not isinstance(message, Standing):
            super().hear(message, speaker)
            return
        checked = self.checks.heard(message, speaker)
        if checked is not None:
            self.tell(checked)

    def act(self, action: Action) -> None:
        match action:
            case Post(leg=leg, source=source, destination=destination, grant=grant):
                self.posts.make(
                    action,
                    self.sources.peer(leg.p_epoch),
                    lambda peer: self.transport.read(peer, destination, source, grant),
                )
            case CheckGrant():
                self.checks.ask(action)
            case TryDrain(leg):
                self._try_drain(leg)
            case Lost(tid, _) | Closed(tid) | Committed(tid, _):
                self.checks.forget(tid)
                super().act(action)
            case _:
                super().act(action)

    def _try_drain(self, leg: Leg) -> None:
        self.tell(DrainSaid(leg, self.sources.drained(leg.p_epoch)))

    def transport_turn(self) -> None:
        for made, outcome in self.transport.poll():
            self._guarded(self.posts.ended, made, outcome)
        for event in self.transport.events():
            if event.final:  # otherwise it attaches anew; what was being read ends by itself
                self._guarded(self.source_gone, event.peer_epoch, f"its pages cannot be read: {event.reason}")

    def source_gone(self, epoch: int, reason: str) -> None:
        """The session goes too: who names that worker again reaches it anew, if it is there."""
        super().source_gone(epoch, reason)
        self.sources.drop(epoch)
        self.peers.drop(epoch)

    # ------------------------------------------------------------ looking

    def reads(self) -> Counter[str]:
        return self.checks.outcomes + Counter(taints=self.lender.taints)

    def tables(self) -> dict[str, Any]:
        return {**super().tables(), "posts": len(self.posts), "checks": len(self.checks)}
