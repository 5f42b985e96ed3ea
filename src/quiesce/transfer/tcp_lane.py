"""One connection of a poster: a thread that connects and sends jobs, and for reads another one that receives.

Answers to writes are read by the owner's thread. What the threads have to say reaches the owner through its inbox.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from quiesce.transfer import tcp_wire as wire
from quiesce.transfer.interface import Post
from quiesce.transfer.tcp_pages import Few, Pieces, Pool, only
from quiesce.transfer.tcp_stream import Gate, Stream, shut
from quiesce.transfer.tcp_wire import ANSWER, HEADER, Closed, Kind, Malformed, Status

log = logging.getLogger("quiesce.transfer")

WINDOW = 64  # jobs sent and not answered; what waits behind them can still be cancelled
_NO_GATE = Gate(frozenset())  # of what is sent: nothing of it lands here
DIRECT_BYTES = 128 << 10  # a job up to this size is sent by the owner's own thread when the lane is idle


@dataclass(eq=False)
class Sum:
    """One post: how many of its jobs are not over, and whether one failed. No outcome before `left` is 0."""

    post: Post
    left: int
    failed: bool = False
    unknown: bool = False


@dataclass(eq=False)
class Job:
    id: int
    total: Sum
    kind: Kind
    region: int
    generation: int
    remote: bytes  # the lender's page numbers, as they travel
    pool: Pool
    own: tuple[int, ...]  # own pages: sent for a write, filled for a read
    gate: Gate = _NO_GATE
    filled: bool = False  # a read: its pages have come, once

    @property
    def pages(self) -> int:
        return len(self.own)

    @property
    def size(self) -> int:
        """Bytes of its pages."""
        return self.pages * self.pool.page_bytes

    def frame(self) -> Pieces | Few:
        head = HEADER.pack(self.kind, self.region, self.pages, self.id, self.generation, self.size) + self.remote
        return self.pool.pieces(self.own, head) if self.kind is Kind.WRITE else only(head)


class Owner(Protocol):
    """Whom a lane tells; called from its threads, through the inbox."""

    def lane_up(self, lane: Lane, generation: int) -> None: ...
    def lane_answered(self, lane: Lane, status: int, job: int) -> None: ...
    def lane_over(self, lane: Lane, reason: str, final: bool) -> None: ...


@dataclass(frozen=True)
class Way:
    """How to get to a lender as lane `lane` of `lanes`."""

    lender: wire.Descriptor
    own_epoch: int
    attachment: int
    lane: int
    lanes: int
    tls: ssl.SSLContext | None


class Lane:
    def __init__(self, way: Way, owner: Owner, put: Callable[[Callable[[], None]], None]) -> None:
        self.way = way
        self.stream: Stream | None = None  # set by the owner's thread once it is up
        self.queue: deque[Job] = deque()
        self.sent: dict[int, Job] = {}  # taken for sending and not answered
        self.over = False
        self.cond = threading.Condition()
        self._owner, self._put = owner, put
        self._sending = False
        self._rest: Pieces | Few | None = None  # what the owner's thread could not send of a job at once
        self._threads = 0
        self._partial = b""
        self._sock: socket.socket | None = None

    # ------------------------------------------------------------ the owner's thread

    def start(self) -> None:
        self._thread(self._send_jobs)

    def _thread(self, work: Callable[[], None]) -> None:
        self._threads += 1
        threading.Thread(target=self._run, args=(work,), name="tcp-lane", daemon=True).start()

    @property
    def done(self) -> bool:
        """No thread of it runs any more, so nothing reads or writes a page for it."""
        return self._threads == 0

    def end(self) -> None:
        with self.cond:
            self.over = True
            self.cond.notify_all()
        if self._sock is not None:
            shut(self._sock)
        if self.stream is not None:
            self.stream.end()

    def close(self) -> None:
        """Once it is done."""
        if self._sock is not None:
            self._sock.close()

    def add(self, job: Job) -> None:
        with self.cond:
            self.queue.append(job)

    def go(self) -> None:
        """Sends a small job at once where the lane is idle; otherwise its thread does it all."""
        if self.stream is None:
            return
        with self.cond:
            if self._sending or self.over or len(self.queue) != 1 or len(self.sent) >= WINDOW:
                self.cond.notify()
                return
            if self.queue[0].size > DIRECT_BYTES:
                self.cond.notify()
                return
            frame = self._take().frame()
        try:
            while frame.left and self.stream.try_send(frame):
                pass
        except Closed:
            pass  # its thread will see it as well
        with self.cond:
            self._rest = frame if frame.left else None
            self._sending = bool(self._rest)
            if self._rest or self.over:  # waking its thread for nothing costs as much as the send
                self.cond.notify()

    def _take(self) -> Job:
        job = self.queue.popleft()
        self.sent[job.id] = job
        self._sending = True
        return job

    def answered(self, job: int) -> Job | None:
        with self.cond:
            if self.queue:  # it may have waited for the window
                self.cond.notify()
            return self.sent.pop(job, None)

    def read_answers(self) -> None:
        """What has come for writes. Raises Closed, Malformed."""
        assert self.stream is not None
        buffer = bytearray(ANSWER.size * 64)
        while True:
            got = self.stream.receive_some(memoryview(buffer))
            if got is None:
                return
            data = self._partial + buffer[:got]
            whole = len(data) - len(data) % ANSWER.size
            self._partial = bytes(data[whole:])
            for status, _, job in ANSWER.iter_unpack(data[:whole]):
                if status == Status.DATA:
                    raise Malformed("data that nobody has asked for")
                self._owner.lane_answered(self, status, job)
            if got < len(buffer):
                return

    def receive_reads(self) -> None:
        """Pages may come from now on, so a thread takes over from `read_answers`."""
        self._thread(self._receive)

    # ------------------------------------------------------------ its threads

    def _run(self, work: Callable[[], None]) -> None:
        reason, final = "ended here", False
        try:
            work()
        except Closed as error:
            reason = str(error)
        except Malformed as error:
            reason = f"the lender broke the protocol: {error}"
        except ConnectionRefusedError as error:
            reason, final = f"nobody listens there any more: {error}", True
        except _TurnedAway as error:
            reason, final = f"turned away: {error}", error.final
        except OSError as error:
            reason = f"cannot connect: {error}"
        except Exception as error:  # whatever it is, its jobs must come to an end
            log.exception("a connection of tcp ends by a fault")
            reason = f"{type(error).__name__}: {error}"

        def say() -> None:
            self._threads -= 1
            self._owner.lane_over(self, reason, final)

        self._put(say)

    def _send_jobs(self) -> None:
        stream = self._connect()
        while True:
            with self.cond:
                while not (self.over or self._rest or self._may_take()):
                    self.cond.wait()
                if self.over:
                    raise Closed("ended here")
                frame, self._rest = self._rest or self._take().frame(), None
            stream.send_pieces(frame)
            with self.cond:
                self._sending = False

    def _may_take(self) -> bool:
        return bool(self.queue) and not self._sending and len(self.sent) < WINDOW

    def _connect(self) -> Stream:
        way = self.way
        deadline = time.monotonic() + wire.HANDSHAKE_SECONDS
        sock = socket.create_connection((way.lender.host, way.lender.port), wire.HANDSHAKE_SECONDS)
        self._sock = sock
        wire.keep_alive(sock)
        if way.tls is not None:
            sock = self._sock = way.tls.wrap_socket(sock)
        if self.over:
            raise Closed("ended here")
        knock = wire.Knock(
            version=wire.PROTOCOL,
            epoch=way.own_epoch,
            holder=way.lender.holder,
            attachment=way.attachment,
            lane=way.lane,
            lanes=way.lanes,
            nonce=secrets.token_bytes(16),
        )
        wire.send_packet(sock, knock)
        challenge = _expect(sock, wire.Challenge, deadline)
        proof = wire.proof_of(way.lender.secret, b"lender", knock, challenge.nonce)
        if not hmac.compare_digest(challenge.proof, proof):
            raise _TurnedAway("it does not know the secret of its descriptor", final=True)
        wire.send_packet(sock, wire.Response(wire.proof_of(way.lender.secret, b"poster", knock, challenge.nonce)))
        attached = _expect(sock, wire.Attached, deadline)
        stream = Stream(sock)
        self._put(lambda: self._up(stream, attached.generation))
        return stream

    def _up(self, stream: Stream, generation: int) -> None:
        """In the owner's thread."""
        self.stream = stream
        if self.over:
            stream.end()
        else:
            self._owner.lane_up(self, generation)
            with self.cond:
                self.cond.notify()

    def _receive(self) -> None:
        stream = self.stream
        assert stream is not None
        head, self._partial = self._partial, b""
        while True:
            status, pages, number = ANSWER.unpack(head + stream.receive(ANSWER.size - len(head)))
            head = b""
            if status == Status.DATA:
                status = self._fill(stream, pages, number)
            elif status == Status.PLACED and self._unfilled(number):
                raise Malformed(f"job {number} reads, and ends without its pages")
            self._put(partial(self._owner.lane_answered, self, status, number))

    def _fill(self, stream: Stream, pages: int, number: int) -> int:
        with self.cond:
            job = self.sent.get(number)
        if job is None or job.kind is not Kind.READ or job.pages != pages or job.filled:
            raise Malformed(f"{pages} pages for job {number}, which has not asked for them")
        job.filled = True  # a second time they would land after its outcome was told
        placed = stream.place(job.gate, job.pool.pieces(job.own))
        status, _, again = ANSWER.unpack(stream.receive(ANSWER.size))
        if again != number:
            raise Malformed(f"job {again} ends in the middle of job {number}")
        return status if placed else Status.REVOKED

    def _unfilled(self, number: int) -> bool:
        with self.cond:
            job = self.sent.get(number)
        return job is not None and job.kind is Kind.READ and not job.filled


class _TurnedAway(Exception):
    def __init__(self, reason: str, final: bool) -> None:
        super().__init__(reason)
        self.final = final


P = TypeVar("P", bound=wire.Packet)


def _expect(sock: socket.socket, kind: type[P], deadline: float) -> P:
    packet = wire.receive_packet(sock, deadline)
    if isinstance(packet, wire.TurnedAway):
        raise _TurnedAway(packet.reason, packet.final)
    if not isinstance(packet, kind):
        raise Malformed(f"{type(packet).__name__} instead of {kind.__name__}")
    return packet
