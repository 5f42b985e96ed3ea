"""The lending side of tcp: takes connections, places what was offered, serves reads, and refuses all the rest.

One thread a connection. The owner's thread lends, withdraws and fences: it shuts gates, and then passes every
barrier of the peer's connections, those of attachments that are being ended as well, so that what it says afterwards
is true to the byte.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from quiesce.transfer import tcp_wire as wire
from quiesce.transfer.inbox import Inbox
from quiesce.transfer.incoming import incoming
from quiesce.transfer.interface import Access, Arena, PeerLost
from quiesce.transfer.tcp_pages import Pool
from quiesce.transfer.tcp_permits import Permits
from quiesce.transfer.tcp_stream import Gate, Stream, shut
from quiesce.transfer.tcp_wire import ANSWER, HEADER, NUMBER, Closed, Header, Kind, Malformed, Status
from quiesce.transfer.watch import Watch

log = logging.getLogger("quiesce.transfer")

MAX_HALF_OPEN = 32
_COUNTED = {status: f"jobs_{status.name.lower()}" for status in Status}


@dataclass(eq=False)
class Attachment:
    """All connections of one poster, made together: it ends as a whole."""

    epoch: int
    number: int
    lanes: int
    streams: dict[int, Stream] = field(default_factory=dict)  # by lane
    over: bool = False

    @property
    def complete(self) -> bool:
        return len(self.streams) == self.lanes and not self.over


class TcpLender:
    """`tls`: the server's context, or None. Raises OSError when it cannot listen on `host`."""

    def __init__(
        self,
        watch: Watch,
        inbox: Inbox,
        epoch: int,
        host: str,
        max_peers: int,
        lanes: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._watch, self._inbox = watch, inbox
        self._epoch, self._host, self._max_peers, self._lanes, self._tls = epoch, host, max_peers, lanes, tls
        self._master = secrets.token_bytes(32)
        self._anybody = False
        self._arena: Arena | None = None
        self._pool: Pool | None = None
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()  # of what follows
        self._attached: dict[int, Attachment] = {}  # by peer epoch
        self._placing: dict[int, set[Stream]] = {}  # by peer epoch: all whose threads may still touch a page
        self._half_open: dict[socket.socket, float] = {}
        self._threads: set[threading.Thread] = set()
        self._newest: dict[int, int] = {}  # attached peer's epoch -> its newest generation
        self._closed = False
        self.permits = Permits()
        self.lost: list[PeerLost] = []
        self.counters: Counter[str] = Counter()

    def lend_arena(self, arena: Arena) -> None:
        self._arena = arena
        self._pool = Pool(arena.pages)

    def descriptor(self, peer_epoch: int | None) -> wire.Descriptor:
        if self._arena is None:
            raise ValueError("register an arena before handing out its descriptor")
        if peer_epoch == wire.ANYBODY:
            raise ValueError("no process has the epoch 0")  # its secret would open what is lent to everybody
        if self._listener is None:
            self._listen()
        assert self._listener is not None
        holder = wire.ANYBODY if peer_epoch is None else peer_epoch
        self._anybody = self._anybody or holder == wire.ANYBODY
        return wire.Descriptor(
            kind="tcp",
            host=self._host,
            port=self._listener.getsockname()[1],
            holder=holder,
            secret=wire.secret_of(self._master, holder),
            epoch=self._epoch,
            region=0,
            pages=self._arena.count,
            page_bytes=self._arena.page_bytes,
            lanes=self._lanes,
            tls=self._tls is not None,
        )

    def _listen(self) -> None:
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))  # a fresh port for each process: nothing of an old one reaches a new one
            listener.listen(MAX_HALF_OPEN)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._watch.add(listener.fileno(), self._accept)

    # ------------------------------------------------------------ attaching

    def _accept(self) -> None:
        assert self._listener is not None
        for sock, address in incoming(self._listener, MAX_HALF_OPEN, log, "a connection"):
            with self._lock:
                if len(self._half_open) >= MAX_HALF_OPEN:
                    oldest = next(iter(self._half_open))  # who stops half way makes room for who does not
                    self._half_open.pop(oldest)
                    shut(oldest)
                self._half_open[sock] = time.monotonic() + wire.HANDSHAKE_SECONDS
            self._start(partial(self._serve, sock, str(address[0])))

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="tcp-lender", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        """A connection's thread, from its handshake to its end."""
        attachment, stream, reason = None, None, "closed by the other side"
        try:
            wire.keep_alive(sock)
            sock = self._wrap(sock)
            knock = self._shake_hands(sock)
            stream = Stream(sock)
            attachment = self._attach(knock, stream)
            self._read_frames(attachment, stream)
        except Closed as error:
            reason = str(error)
        except (Malformed, struct.error) as error:
            reason = f"broke the protocol: {error}"
            self._refuse("malformed", f"{address} {reason}")
        except (OSError, ssl.SSLError) as error:
            reason = f"did not finish the handshake: {error}"
            self._refuse("attach_refused", f"{address} {reason}")
        finally:
            with self._lock:
                self._half_open.pop(sock, None)
                self.counters["late_bytes"] += 0 if stream is None else stream.late_bytes
            if attachment is not None and stream is not None:
                self._end(attachment, reason)
                self._places_no_more(attachment.epoch, stream)
            sock.close()

    def _refuse(self, what: str, text: str) -> None:
        self._count(what)
        log.warning("tcp: %s", text)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1

    def _wrap(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        sock.settimeout(wire.HANDSHAKE_SECONDS)
        wrapped = self._tls.wrap_socket(sock, server_side=True)
        with self._lock:
            self._half_open[wrapped] = self._half_open.pop(sock, 0.0)
        return wrapped

    def _shake_hands(self, sock: socket.socket) -> wire.Knock:
        with self._lock:
            deadline = self._half_open.get(sock, 0.0)
        knock = wire.receive_packet(sock, deadline)
        if not isinstance(knock, wire.Knock) or not 1 <= knock.lanes <= wire.MAX_LANES or knock.epoch < 0:
            raise Malformed(f"no greeting: {type(knock).__name__}")
        if knock.version != wire.PROTOCOL:
            raise self._turn_away(sock, f"protocol version: {wire.PROTOCOL} here, {knock.version} there", final=True)
        if knock.holder not in (knock.epoch, wire.ANYBODY) or not 0 <= knock.lane < knock.lanes <= self._lanes:
            raise self._turn_away(sock, "the descriptor was made for another peer", final=True)
        secret = wire.secret_of(self._master, knock.holder)
        nonce = secrets.token_bytes(16)
        wire.send_packet(sock, wire.Challenge(nonce, wire.proof_of(secret, b"lender", knock, nonce)))
        response = wire.receive_packet(sock, deadline)
        known = knock.holder != wire.ANYBODY or self._anybody
        proof = wire.proof_of(secret, b"poster", knock, nonce)
        if not isinstance(response, wire.Response) or not hmac.compare_digest(response.proof, proof) or not known:
            raise self._turn_away(sock, "wrong secret", final=True)
        return knock

    def _turn_away(self, sock: socket.socket, reason: str, *, final: bool) -> Closed:
        self._refuse("attach_refused", f"a connection is turned away: {reason}")
        wire.send_packet(sock, wire.TurnedAway(reason, final))
        return Closed(reason)

    def _attach(self, knock: wire.Knock, stream: Stream) -> Attachment:
        """Ends the poster's earlier attachment first: what is said then about its posts is true."""
        refusal = None
        before = None
        with self._lock:
            found = self._attached.get(knock.epoch)
            if self._closed:
                refusal = "the lender is closing"
            elif found is None and len(self._attached) >= self._max_peers:
                refusal = f"{self._max_peers} peers are attached already"
            elif found is not None and found.number > knock.attachment:
                refusal = "a newer attachment of this peer is there"
            elif found is None or found.number < knock.attachment:
                before, found = found, Attachment(knock.epoch, knock.attachment, knock.lanes)
                self._attached[knock.epoch] = found
        if before is not None:
            self._end(before, "attached anew")
        stream.sock.settimeout(wire.HANDSHAKE_SECONDS)
        if refusal is not None or found is None:
            raise self._turn_away(stream.sock, refusal or "", final=False)
        with self._lock:
            if found.over or knock.lane in found.streams:
                raise Closed("its attachment has ended")
            found.streams[knock.lane] = stream
            self._placing.setdefault(knock.epoch, set()).add(stream)
            if found.complete:
                self._newest[knock.epoch] = self.permits.mint()
            generation = self._newest.get(knock.epoch, 0)
            self._half_open.pop(stream.sock, None)
        try:
            wire.send_packet(stream.sock, wire.Attached(generation))
        except OSError as error:  # it has left: what it has begun ends with it
            self._end(found, str(error))
            self._places_no_more(knock.epoch, stream)
            raise
        stream.set_mode()
        self._inbox.put(lambda: None)  # wakes who waits for `generation`
        return found

    # ------------------------------------------------------------ frames

    def _read_frames(self, attachment: Attachment, stream: Stream) -> None:
        assert self._arena is not None
        size = self._arena.page_bytes
        while True:
            head = stream.receive(HEADER.size, NUMBER.size)  # a job of one page has come in one piece then
            header = Header._make(HEADER.unpack_from(head))
            if not 1 <= header.pages <= wire.MAX_JOB_PAGES:
                raise Malformed(f"a job of {header.pages} pages")
            numbers = head[HEADER.size :]
            if missing := NUMBER.size * header.pages - len(numbers):
                numbers = memoryview(bytes(numbers) + stream.receive(missing))
            pages = struct.unpack(f"<{header.pages}I", numbers)
            if header.length != header.pages * size:
                raise Malformed(f"{header.length} bytes for {header.pages} pages of {size}")
            match header.kind:
                case Kind.WRITE:
                    status = self._write(attachment, stream, header, pages)
                case Kind.READ:
                    status = self._read(attachment, stream, header, pages)
                case other:
                    raise Malformed(f"a frame of kind {other}")
            self._count(_COUNTED[status])
            stream.send(ANSWER.pack(status, header.pages, header.job))

    def _gate(self, attachment: Attachment, access: Access, header: Header, pages: tuple[int, ...]) -> Gate | None:
        gate = self.permits.find(attachment.epoch, access, header.generation)
        if gate is None or header.region != 0 or not gate.pages.issuperset(pages):
            return None
        return gate

    def _write(self, attachment: Attachment, stream: Stream, header: Header, pages: tuple[int, ...]) -> Status:
        assert self._pool is not None
        gate = self._gate(attachment, "write", header, pages)
        if gate is None:
            stream.discard(header.length)
            return Status.NOT_OFFERED
        return Status.PLACED if stream.place(gate, self._pool.pieces(pages)) else Status.REVOKED

    def _read(self, attachment: Attachment, stream: Stream, header: Header, pages: tuple[int, ...]) -> Status:
        assert self._pool is not None
        gate = self._gate(attachment, "read", header, pages)
        if gate is None:
            return Status.NOT_OFFERED
        stream.send(ANSWER.pack(Status.DATA, header.pages, header.job))
        return Status.PLACED if stream.serve(gate, self._pool.pieces(pages)) else Status.REVOKED

    # ------------------------------------------------------------ ending

    def _end(self, attachment: Attachment, reason: str) -> None:
        """Ends all its connections; from the return on nothing of it is placed. It leaves the table after that, so
        that whoever attaches anew meanwhile finds it there, and waits for its end as well."""
        with self._lock:
            first, attachment.over = not attachment.over, True
            streams = list(attachment.streams.values())
            newest = None
            if first and len(streams) == attachment.lanes:
                newest = self._newest.get(attachment.epoch)
        for stream in streams:
            stream.end()
        with self._lock:
            if self._attached.get(attachment.epoch) is attachment:
                del self._attached[attachment.epoch]
            if attachment.epoch not in self._attached:
                self._newest.pop(attachment.epoch, None)
        if newest is not None:
            lost = PeerLost(attachment.epoch, newest, f"detached: {reason}", False)
            self._inbox.put(lambda: self.lost.append(lost))

    def _places_no_more(self, peer_epoch: int, stream: Stream) -> None:
        with self._lock:
            streams = self._placing.get(peer_epoch, set())
            streams.discard(stream)
            if not streams:
                self._placing.pop(peer_epoch, None)

    def _barrier(self, peer_epoch: int) -> None:
        """All of them: one whose attachment was replaced or is being ended may be in the middle of a receive."""
        with self._lock:
            streams = list(self._placing.get(peer_epoch, ()))
        for stream in streams:
            stream.barrier()

    # ------------------------------------------------------------ lending and what it can prove

    def generation(self, peer_epoch: int) -> int | None:
        with self._lock:
            found = self._attached.get(peer_epoch)
            return self._newest.get(peer_epoch) if found is not None and found.complete else None

    def lend(self, peer_epoch: int, pages: tuple[int, ...], access: Access, generation: int | None) -> int | None:
        with self._lock:
            found = self._attached.get(peer_epoch)
            if found is None or not found.complete:
                return None
            made = self.permits.lend(peer_epoch, pages, access, generation)
            self._newest[peer_epoch] = max(made, self._newest.get(peer_epoch, 0))
            return made

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        if self.permits.withdraw(peer_epoch, generation):
            self._barrier(peer_epoch)

    def revoke(self, peer_epoch: int, generation: int, pages: frozenset[int] | None) -> None:
        self.permits.revoke(peer_epoch, generation, pages)
        self._barrier(peer_epoch)

    def late_bytes(self) -> int:
        with self._lock:
            streams = [stream for found in self._attached.values() for stream in found.streams.values()]
        return self.counters["late_bytes"] + sum(stream.late_bytes for stream in streams)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            half_open, attached = list(self._half_open), list(self._attached.values())
        if self._listener is not None:
            self._watch.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for sock in half_open:
            shut(sock)
        for attachment in attached:
            self._end(attachment, "lender closed")
        for thread in list(self._threads):
            thread.join(1.0)
