"""The posting side of engines with agents: one courier for each attachment, and every post owned to its end."""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer import attach as wire
from quiesce.transfer.agent import Direction, Engine
from quiesce.transfer.agent_target import Open, Part, Target, written
from quiesce.transfer.couriers import Batch, Courier, CourierOwner, Joined, Told
from quiesce.transfer.interface import Arena, Peer, PeerLost, Post
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

RETRY_FIRST, RETRY_MOST = 0.05, 2.0  # seconds
MAX_COURIERS = 8  # of one connection: each but one waits for posts of an ended attachment

_DescriptorDecoder = msgspec.msgpack.Decoder(wire.Descriptor)


class AgentPoster(CourierOwner):
    def __init__(
        self, watch: Watch, told: Told, engine: Engine, max_transfer_pages: int, max_open_posts: int, max_peers: int
    ) -> None:
        self._watch, self._told, self._engine = watch, told, engine
        self._part_pages = min(max_transfer_pages, engine.limits.pages_in_flight)
        self._max_open_posts, self._max_peers = max_open_posts, max_peers
        self._arena: Arena | None = None
        self._targets: dict[int, Target] = {}  # by Peer.number; leaves when over and nothing is open
        self._by_courier: dict[Courier, Target] = {}
        self._parts: dict[Batch, list[Part]] = {}  # at a courier
        self._opens: dict[int, Open] = {}  # by Post.id
        self._last_number = self._last_post = 0
        self.ended: list[tuple[Post, Outcome]] = []
        self.lost_peers: list[PeerLost] = []
        names = ("posts", "placed_pages", "failed_posts", "unknown_posts", "drain_writes", "agents_lost")
        self.counters = dict.fromkeys(names, 0)

    def use(self, arena: Arena) -> None:
        self._arena = arena

    # ------------------------------------------------------------ connections

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        if self._arena is None:
            raise ValueError("register an arena before connecting")
        lender = self._read(descriptor)
        for known in self._targets.values():
            if known.lender == lender and known.own_epoch == own_epoch and not known.over:
                return known.peer
        if sum(not target.over for target in self._targets.values()) >= self._max_peers:
            raise ValueError(f"{self._max_peers} connections are open already")
        self._last_number += 1
        target = Target(Peer(lender.epoch, self._last_number), own_epoch, lender)
        self._targets[target.peer.number] = target
        self._dial(target)
        return target.peer

    def _read(self, descriptor: bytes) -> wire.Descriptor:
        assert self._arena is not None
        label = self._engine.caps.label
        try:
            lender = _DescriptorDecoder.decode(descriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"not the descriptor of {label}: {error}") from error
        if lender.kind != label:
            raise ValueError(f"the peer moves pages by {lender.kind}, this worker by {label}")
        wire.check_address(lender.address)
        if lender.page_bytes != self._arena.page_bytes:
            raise ValueError(f"pages of {lender.page_bytes} bytes there, {self._arena.page_bytes} here")
        if not 1 <= lender.pages < 2**31:
            raise ValueError(f"a lender cannot have {lender.pages} pages")
        return lender

    def disconnect(self, peer: Peer) -> None:
        target = self._targets.get(peer.number)
        if target is not None and not target.over:
            self._give_up(target)

    def _give_up(self, target: Target) -> None:
        target.over, target.retry_at = True, None
        self._detach(target)
        self._tidy(target)

    def _dial(self, target: Target) -> None:
        target.retry_at = None
        try:
            line = wire.dial(target.lender.address)
        except ConnectionRefusedError:
            self._on_lost(target, "no process listens at its address", final=True)
            return
        except OSError as error:
            self._on_lost(target, f"it cannot be reached: {error}", final=False)
            return
        target.line, target.connecting = line, True
        target.deadline = time.monotonic() + wire.ATTACH_SECONDS
        self._watch.add(line.fileno(), lambda: self._on_line(target, line))
        self._watch.want_writable(line.fileno(), True)

    def _on_line(self, target: Target, line: wire.Line) -> None:
        if target.line is not line:
            return
        try:
            if target.connecting:
                failed = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    refused = failed == errno.ECONNREFUSED
                    self._on_lost(target, f"it cannot be reached: error {failed}", final=refused)
                    return
                target.connecting, target.challenge = False, secrets.token_bytes(16)
                self._watch.want_writable(line.fileno(), False)
                line.say(wire.Greet(target.own_epoch, target.challenge))
            for packet in line.hear():
                if target.line is line:
                    self._step(target, line, packet)
        except wire.Closed as error:
            self._on_lost(target, str(error), final=False)
        except wire.Malformed as error:
            self._on_lost(target, f"it broke the handshake: {error}", final=False)

    def _step(self, target: Target, line: wire.Line, packet: wire.Packet) -> None:
        token = target.lender.token
        match packet:
            case wire.Challenge(proof=proof, challenge=challenge) if target.challenge:
                if not hmac.compare_digest(proof, wire.prove(token, "lender", target.challenge, challenge)):
                    self._on_lost(target, "another process answers at its address", final=True)
                    return
                line.say(wire.Answer(wire.prove(token, "poster", challenge, target.challenge)))
                target.challenge = b""
            case wire.Lent() as lent if target.courier is None and not target.challenge:
                assert self._arena is not None
                joined = Joined(lent.agent, lent.base, lent.scratch, self._arena.page_bytes, lent.trial)
                courier = Courier(self._engine, self._arena, self._told, self, joined)
                target.courier, target.generation = courier, lent.generation
                target.couriers[courier] = set()
                self._by_courier[courier] = target
            case wire.Refused(reason=reason, final=final):
                self._on_lost(target, f"it refuses: {reason}", final)
            case other:
                raise wire.Malformed(f"unexpected {type(other).__name__}")

    def _on_lost(self, target: Target, reason: str, final: bool) -> None:
        if target.over:
            return
        if target.attached or final:
            self.lost_peers.append(PeerLost(target.peer.epoch, target.generation, reason, final))
        settled = target.attached
        self._detach(target)
        if final:
            self._give_up(target)
            return
        target.tries = 0 if settled else target.tries + 1
        target.retry_at = time.monotonic() + min(RETRY_MOST, RETRY_FIRST * 2 ** min(target.tries, 10))

    def _detach(self, target: Target) -> None:
        """The attachment is over: its courier ends once what is under way has; what never started is over now."""
        if target.line is not None:
            self._watch.remove(target.line.fileno())
            target.line.close()
        target.line, target.attached, target.connecting, target.deadline = None, False, False, None
        if target.courier is not None:
            target.courier.end()
        target.courier, target.challenge = None, b""
        waiting, target.queue = target.queue, deque()
        for part in waiting:
            self._part_over(target, part, Outcome.FAILED_CLEAN)

    def tick(self, now: float) -> None:
        for target in list(self._targets.values()):
            if target.retry_at is not None and target.retry_at <= now and len(target.couriers) < MAX_COURIERS:
                self._dial(target)
            elif target.deadline is not None and target.deadline <= now:
                self._on_lost(target, "the handshake takes too long", final=False)

    def next_deadline(self) -> float | None:
        due = [
            t.retry_at for t in self._targets.values() if t.retry_at is not None and len(t.couriers) < MAX_COURIERS
        ]
        due += [t.deadline for t in self._targets.values() if t.deadline is not None]
        return min(due, default=None)

    # ------------------------------------------------------------ what couriers tell

    def joined(self, courier: Courier) -> None:
        target = self._by_courier[courier]
        if target.courier is not courier or target.line is None:
            return
        try:
            target.line.say(wire.Attached(target.generation))
        except wire.Closed as error:
            self._on_lost(target, str(error), final=False)
            return
        target.attached, target.deadline, target.tries = True, None, 0

    def placed(self, courier: Courier, batch: Batch) -> None:
        self.counters["placed_pages"] += len(batch.own)
        self._batch_over(courier, batch, Outcome.PLACED)

    def lost(self, courier: Courier, batch: Batch, started: bool, reason: str) -> None:
        target = self._by_courier[courier]
        log.info("a batch of %d pages to epoch %x is lost: %s", len(batch.own), target.peer.epoch, reason)
        if started:
            target.unproven.add(courier)
        self._batch_over(courier, batch, Outcome.UNKNOWN if started else Outcome.FAILED_CLEAN)

    def flushed(self, courier: Courier) -> None:
        self.counters["drain_writes"] += 1
        self._by_courier[courier].unproven.discard(courier)

    def broken(self, courier: Courier, reason: str) -> None:
        target = self._by_courier[courier]
        self.counters["agents_lost"] += 1
        log.warning("the connection to epoch %x is made anew: %s", target.peer.epoch, reason)
        if target.courier is courier:
            self._on_lost(target, reason, final=False)
        else:
            courier.end()

    def courier_ended(self, courier: Courier, clean: bool) -> None:
        target = self._by_courier.pop(courier)
        for batch in list(target.couriers[courier]):  # it could not wait for them
            self._batch_over(courier, batch, Outcome.UNKNOWN)
        del target.couriers[courier]
        self._tidy(target)

    # ------------------------------------------------------------ posts

    def post(self, direction: Direction, peer: Peer, own: Sequence[int], theirs: Sequence[int], grant: Grant) -> Post:
        self.counters["posts"] += 1
        self._last_post += 1
        post = Post(self._last_post, peer)
        target = self._targets.get(peer.number)
        refusal = self._refusal(target, own, theirs, grant)
        if refusal is not None or target is None:
            log.info("post %d to epoch %x refused, nothing was touched: %s", post.id, peer.epoch, refusal)
            self._end(post, Outcome.FAILED_CLEAN)
            return post
        if not len(own):
            self._end(post, Outcome.PLACED)
            return post
        ours, far = np.asarray(own, np.int64), np.asarray(theirs, np.int64)
        starts = range(0, len(ours), self._part_pages)
        opened = self._opens[post.id] = Open(post, len(starts))
        target.open_posts += 1
        for start in starts:
            part = slice(start, start + self._part_pages)
            target.queue.append(Part(opened, direction, ours[part], far[part]))
        self._feed(target)
        return post

    def _refusal(self, target: Target | None, own: Sequence[int], theirs: Sequence[int], grant: Grant) -> str | None:
        if target is None or target.over:
            return "the connection is closed or its lender is gone"
        if not target.attached:
            return "it is not attached now"
        if grant.generation != target.generation or grant.region != target.lender.region:
            return f"granted under generation {grant.generation}, attached under {target.generation}"
        if len(self._opens) >= self._max_open_posts:
            return f"{self._max_open_posts} posts are open already"
        if len(own) != len(theirs):
            return f"{len(own)} own pages for {len(theirs)} of the peer"
        assert self._arena is not None
        if len(own) and (min(own) < 0 or max(own) >= self._arena.count):
            return f"an own page is outside 0..{self._arena.count - 1}"
        if len(theirs) and (min(theirs) < 0 or max(theirs) >= target.lender.pages):
            return f"a page of the peer is outside 0..{target.lender.pages - 1}"
        if not frozenset(grant.pages).issuperset(theirs):
            return "a page of the peer is not in the grant"
        return None

    def _feed(self, target: Target) -> None:
        """Hands batches to the courier: what waits is put together as long as no page is written twice at a time."""
        courier = target.courier
        while target.queue and courier is not None and target.attached:
            under_way = target.couriers[courier]
            if len(under_way) >= self._engine.limits.batches_in_flight:
                return
            parts = self._gather(target, under_way)
            if not parts:
                return
            own, theirs = (np.concatenate([getattr(part, side) for part in parts]) for side in ("own", "theirs"))
            batch = Batch(parts[0].direction, own, theirs)
            self._parts[batch] = parts
            under_way.add(batch)
            for part in parts:
                part.open.started = True
            courier.post(batch)

    def _gather(self, target: Target, under_way: set[Batch]) -> list[Part]:
        parts: list[Part] = []
        busy = {page for batch in under_way for page in written(batch)}
        room = self._part_pages
        while target.queue:
            part = target.queue[0]
            pages = written(part)
            mixed = parts and part.direction != parts[0].direction
            if mixed or len(part.own) > room or not busy.isdisjoint(pages):
                break
            parts.append(target.queue.popleft())
            busy |= pages
            room -= len(part.own)
        return parts

    def _batch_over(self, courier: Courier, batch: Batch, outcome: Outcome) -> None:
        target = self._by_courier[courier]
        target.couriers[courier].discard(batch)
        for part in self._parts.pop(batch):
            self._part_over(target, part, outcome)
        self._feed(target)

    def _part_over(self, target: Target, part: Part, outcome: Outcome) -> None:
        opened = part.open
        opened.left -= 1
        if outcome is not Outcome.PLACED:
            if opened.worst is not Outcome.UNKNOWN:
                opened.worst = outcome
            for later in [waiting for waiting in target.queue if waiting.open is opened]:
                target.queue.remove(later)
                opened.left -= 1
        if opened.left == 0 and self._opens.pop(opened.post.id, None) is not None:
            target.open_posts -= 1
            self._end(opened.post, opened.worst)
            self._tidy(target)

    def try_cancel(self, post: Post) -> bool:
        opened, target = self._opens.get(post.id), self._targets.get(post.peer.number)
        if opened is None or target is None or opened.started:
            return False
        target.queue = deque(part for part in target.queue if part.open is not opened)
        del self._opens[post.id]
        target.open_posts -= 1
        self._tidy(target)
        return True

    def drained(self, peer: Peer) -> bool:
        target = self._targets.get(peer.number)
        return target is None or (not target.open_posts and not target.unproven)

    def _end(self, post: Post, outcome: Outcome) -> None:
        self.counters["failed_posts"] += outcome is not Outcome.PLACED
        self.counters["unknown_posts"] += outcome is Outcome.UNKNOWN
        self.ended.append((post, outcome))

    def _tidy(self, target: Target) -> None:
        """What was lost and never shown to have landed is remembered as long as this process lives."""
        if target.over and not target.open_posts and not target.couriers and not target.unproven:
            self._targets.pop(target.peer.number, None)

    def close(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for target in self._targets.values():
            target.over, target.retry_at = True, None
            for courier in target.couriers:
                courier.abandoned = True
            self._detach(target)
        for target in self._targets.values():
            for courier in target.couriers:
                courier.wait(max(0.0, until - time.monotonic()))
        for opened in self._opens.values():
            self._end(opened.post, Outcome.UNKNOWN)
        self._opens.clear()
