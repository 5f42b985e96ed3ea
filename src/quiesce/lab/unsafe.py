"""The rules that this project exists to replace: each takes one guard out of one worker.

Only the lab can have them, by replacing one method of one object. A run with one must show corruption, or the run
that shows none proves nothing.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from quiesce.core.admission import pages_for
from quiesce.core.borrower import Chunk, ChunkReady, Complete, Outcome, PostEnded
from quiesce.core.fingerprint import Limits
from quiesce.core.ledger import Ledger
from quiesce.core.lender import Publish
from quiesce.core.machine import CheckGrant, Fired, Heard, Post, Timer
from quiesce.core.messages import Drained, FirstToken, TransferId
from quiesce.core.proofs import Borrowing, Waiver
from quiesce.core.pulling import Checked
from quiesce.lab.race.journal import GatedTransport
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.pull_lending import PullPrefillWorker
from quiesce.roles.pull_reading import PullDecodeWorker
from quiesce.roles.worker import Worker
from quiesce.transfer.choice import Choice
from quiesce.transfer.interface import Peer, Transport
from quiesce.transfer.tcp import TcpTransport
from quiesce.transfer.tcp_lane import Lane
from quiesce.transfer.tcp_lender import MAX_HALF_OPEN, TcpLender
from quiesce.transfer.tcp_poster import TcpPoster
from quiesce.transfer.tcp_stream import Gate
from quiesce.transfer.tcp_target import read_descriptor


def free_at_once(ledger: Ledger, asked: Callable[[], bool] = lambda: True) -> None:
    """From now on, while `asked`, `end` returns the pages whatever remote writer they are lent to. Our own engine's
    steps are still waited for, so that what goes wrong is the race and nothing else."""
    sound_end = ledger.end

    def end(tid: TransferId) -> bool:
        holding = ledger._holdings.get(tid)
        if holding is not None and holding.owned and asked():
            for key in [key for key in holding.leases if key.kind is not Borrowing.COMPUTE]:
                del holding.leases[key]
        return sound_end(tid)

    ledger.end = end  # type: ignore[method-assign]


def errors_count_as_drained(worker: PrefillWorker) -> None:
    """A failed call is taken for the end of its write (against guard A9)."""
    tell = worker.posts._tell

    def believing(ended: PostEnded) -> None:
        clean = ended.outcome is Outcome.UNKNOWN
        tell(dataclasses.replace(ended, outcome=Outcome.FAILED_CLEAN) if clean else ended)

    worker.posts._tell = believing


def acks_by_room(worker: DecodeWorker) -> None:
    """An ack is believed for the transfer that has the room now, whichever it was said of (against guard A13)."""
    tell = worker.tell
    rooms: dict[TransferId, int] = {}
    latest: dict[int, TransferId] = {}

    def by_room(event: Any) -> None:
        if isinstance(event, Publish):
            room = worker.generation.by_tid[event.tid].start.room
            rooms[event.tid], latest[room] = room, event.tid
        elif isinstance(event, Heard) and isinstance(event.message, Drained):
            leg = event.message.leg
            now = latest.get(rooms.get(leg.tid, 0), leg.tid)
            if now != leg.tid:
                message = msgspec.structs.replace(event.message, leg=msgspec.structs.replace(leg, tid=now))
                tell(dataclasses.replace(event, message=message))
        tell(event)

    worker.tell = by_room  # type: ignore[method-assign]


def no_limit_but_the_context(worker: Worker) -> None:
    """The pool's size limits nothing (against guards D1 and D3); the start-up check is left out by who asks this."""
    limits = worker.limits

    def by_context() -> Limits:
        said = limits()
        return msgspec.structs.replace(said, pool_tokens=said.context_length)

    worker.limits = by_context  # type: ignore[method-assign]


def stub_what_does_not_fit(worker: PrefillWorker, first_token: int) -> None:
    """A prompt that is longer than the pool is refused here, and yet goes through the hand-off as if it had been
    computed: nothing is written, and decode reads pages that nobody filled. `first_token`: what it is said to begin
    with."""
    no_limit_but_the_context(worker)
    schedule, make = worker.schedule, worker.posts.make
    stubs: set[int] = set()  # source pages that stand for nothing

    def schedule_or_stub() -> None:
        for job in [job for job in worker.queue if job.sequence is not None]:
            assert job.sequence is not None
            pages = pages_for(job.sequence.prompt_tokens, worker.settings.page_size)
            if pages <= worker.ledger.pool.count:
                continue
            worker.queue.remove(job)
            own = worker.ledger.own(job.leg.tid, 1)
            assert own is not None
            stubs.update(own)
            worker.tell(ChunkReady(job.leg, Chunk(own * pages, 0)))
            worker.tell(Complete(job.leg, job.sequence.prompt_tokens, FirstToken(first_token)))
        schedule()

    def make_or_not(post: Post, peer: Any, call: Any) -> None:
        if stubs.isdisjoint(post.source):
            make(post, peer, call)
            return
        stubs.difference_update(post.source)
        worker.tell(PostEnded(post.leg, post.number, Outcome.PLACED))

    worker.schedule = schedule_or_stub  # type: ignore[method-assign]
    worker.posts.make = make_or_not  # type: ignore[method-assign]


def commit_unchecked(worker: PullDecodeWorker) -> None:
    """What was read counts as lent when it landed: its source is not asked (against guard L10)."""

    def ask(check: CheckGrant) -> None:
        worker.tell(Checked(check.leg, check.leg.p_epoch, check.grant.generation))

    worker.checks.ask = ask  # type: ignore[method-assign]


def leases_by_the_clock(worker: PullPrefillWorker) -> None:
    """A reader that is silent for a lease's time loses it, without a fence and without a word (against guard H11)."""
    fire = worker.fire

    def ending(payload: object) -> None:
        if isinstance(payload, Fired) and payload.timer is Timer.LEASE:
            tid = payload.about if isinstance(payload.about, TransferId) else payload.about.tid
            for key in worker.ledger.leases(tid):
                worker.ledger.waive(key, Waiver("the lease ran out"))
            worker.ledger.end(tid)
        else:
            fire(payload)

    worker.fire = ending  # type: ignore[method-assign]


# ------------------------------------------------------------ on tcp


def place_anything(transport: Transport) -> None:
    """Whatever comes for a page is placed, and whatever is asked for is sent, whether or not it is lent: what an
    engine without a check at placement does. Engines that have none stay as they are."""
    for engine in _tcp(transport):

        def gate(*about: Any) -> Gate:
            return Gate(frozenset(about[-1]))

        engine._lender._gate = gate  # type: ignore[method-assign,assignment]


def live_at(transport: Transport, place: Path) -> None:
    """The address and the secret of whoever was here before are taken over (against guard A14). `place`: a file."""
    for engine in _tcp(transport):
        _take_over(engine._lender, place)


def _take_over(lender: TcpLender, place: Path) -> None:
    before: dict[str, Any] = json.loads(place.read_text() if place.exists() else "null") or {
        "port": 0,
        "secret": lender._master.hex(),
    }
    lender._master = bytes.fromhex(before["secret"])

    def listen() -> None:
        listener = socket.create_server((lender._host, before["port"]), backlog=MAX_HALF_OPEN)
        listener.setblocking(False)
        lender._listener = listener
        lender._watch.add(listener.fileno(), lender._accept)
        place.write_text(json.dumps({**before, "port": listener.getsockname()[1]}))

    lender._listen = listen  # type: ignore[method-assign]


def keep_addresses(transport: Transport, inner: Transport) -> None:
    """Writes that are queued for an address wait until somebody listens there again (against guard A14).
    `transport`: what the worker posts through, around `inner`."""
    for engine in _tcp(inner):
        _wait_for_anybody(engine._poster)
        if isinstance(transport, GatedTransport):
            _queue_while_away(transport, engine._poster)
    transport.disconnect = lambda peer: None  # type: ignore[method-assign]


def _wait_for_anybody(poster: TcpPoster) -> None:
    over, connect = poster.lane_over, poster.connect

    def never_final(lane: Lane, reason: str, final: bool) -> None:
        over(lane, reason, False)

    def by_address(descriptor: bytes, own_epoch: int) -> Peer:
        """Whoever is at an address has the connection that stands: one made anew would end it, and at the lender
        with it what has been lent since to this poster, whose epoch is the same."""
        assert poster._arena is not None
        lender = read_descriptor(descriptor, poster._arena, poster._tls is not None)
        for target in poster._targets.values():
            if (target.lender.host, target.lender.port) == (lender.host, lender.port) and not target.over:
                target.lender = lender
                return target.peer
        return connect(descriptor, own_epoch)

    poster.lane_over, poster.connect = never_final, by_address  # type: ignore[method-assign]


def _queue_while_away(transport: GatedTransport, poster: TcpPoster) -> None:
    """The gate stays shut until every connection stands: a write that is let go before fails, and reaches nobody."""
    shut = transport._shut

    def shut_or_away() -> bool:
        return shut() or not all(target.attached for target in poster._targets.values())

    transport._shut = shut_or_away  # type: ignore[method-assign]


def _tcp(transport: Transport) -> Iterator[TcpTransport]:
    engines = transport._engines.values() if isinstance(transport, Choice) else [transport]
    for engine in engines:
        if isinstance(engine, TcpTransport):
            yield engine
