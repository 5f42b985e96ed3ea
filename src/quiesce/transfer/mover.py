"""The mover: a process of its own beside a posting engine that copies pages into, or out of, the memory of lenders.

It is apart from the engine so that a lender can revoke its access by killing it: a dead process touches nothing,
and the engine survives. `python -m quiesce.transfer.mover CONTROL_FD OWN_FD PAGES PAGE_BYTES PARENT_PID ACCESS`,
where ACCESS is what it may do to the engine's own pool: read (push), write (pull).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quiesce.transfer import copying
from quiesce.transfer import mover_wire as wire

SLICE_BYTES = 6 << 20  # copied before sockets are looked at again, and for one lender before the next one's turn
PREFAULT_BYTES = 8 << 20
AWAKE_SECONDS = 0.0002  # it looks on for so long after the last job: a wake-up costs as much as the copy of six pages
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; map pages without changing their contents
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass
class Copy:
    id: int
    src: bytes  # native int32 [n], checked
    dst: bytes
    read: bool
    done: int = 0  # pages

    @property
    def pages(self) -> int:
        return len(self.src) // 4


@dataclass
class Attachment:
    """One lender: the socket that ties its life to ours, and its pool once mapped."""

    request: wire.Attach
    sock: socket.socket
    deadline: float | None
    greeted: bool = False
    generation: int | None = None  # set once the pool is mapped
    memory: mmap.mmap | None = None
    pool: copying.Pool | None = None
    prefaulted: int = 0
    jobs: deque[Copy] = field(default_factory=deque)


class Mover:
    def __init__(self, control: socket.socket, own: np.ndarray, engine: int) -> None:
        self._control = control
        self._hearing = wire.Hearing(control, wire.MoverDecoder)
        self._copy, *_ = copying.choose()
        self._engine = engine  # pidfd, shown to lenders: they hear of its death, not only of ours
        self._own = copying.Pool(own)  # the engine's: uint8 [pages, page_bytes]
        self._slice = max(1, SLICE_BYTES // own.shape[1])
        self._attached: dict[int, Attachment] = {}
        self._busy: deque[Attachment] = deque()
        self._outbox: deque[wire.Packet] = deque()  # bounded by what the engine has asked for
        self._blocked = False  # the engine does not read as fast as we report
        self._awake_until = 0.0  # time.monotonic() seconds
        self._lone = False  # what has just come had nothing before it: there is hardly more behind it
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(control, self._on_control)

    def run(self) -> None:
        """Serve until the engine closes its end (raises Closed)."""
        while True:
            for fd, _ in self._ready():
                if fd in self._handlers:
                    self._handlers[fd]()
            if self._busy:
                self._copy_some()
            else:
                self._prefault()
            if self._outbox:
                self._flush()
            self._expire()

    def _ready(self) -> list[tuple[int, int]]:
        ready = self._epoll.poll(0.0, 64)
        self._lone = not ready
        if ready or self._busy:
            return ready
        while time.monotonic() < self._awake_until:
            if ready := self._epoll.poll(0.0, 64):
                return ready
        return self._epoll.poll(self._patience(), 64)

    def _patience(self) -> float | None:
        if self._busy or self._unfaulted() is not None:
            return 0.0
        due = [a.deadline for a in self._attached.values() if a.deadline is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _watch(self, sock: socket.socket, handler: Callable[[], None]) -> None:
        self._handlers[sock.fileno()] = handler
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    # ------------------------------------------------------------ the engine

    def _on_control(self) -> None:
        for _ in range(1 if self._lone else 64):  # a look in vain would keep a lone job waiting
            match self._hearing.next():
                case wire.Job() as job:
                    self._accept(job)
                case None:
                    return
                case wire.Attach() as request:
                    self._attach(request)
                case wire.Detach(peer=peer):
                    if peer in self._attached:
                        self._release(self._attached[peer], "disconnected by its own engine")

    def _report(self, packet: wire.Packet) -> None:
        self._outbox.append(packet)
        self._flush()

    def _flush(self) -> None:
        while self._outbox and wire.send(self._control, self._outbox[0]):
            self._outbox.popleft()
        waiting = bool(self._outbox)
        if waiting != self._blocked:
            self._blocked = waiting
            self._epoll.modify(self._control.fileno(), select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    # ------------------------------------------------------------ copying

    def _accept(self, job: wire.Job) -> None:
        attachment = self._attached.get(job.peer)
        reason = self._refusal(job, attachment)
        if reason is not None or attachment is None:
            self._report(wire.Dropped(job.id, reason or "not attached"))
            return
        if not attachment.jobs:
            self._busy.append(attachment)
        attachment.jobs.append(Copy(job.id, job.src, job.dst, job.read))

    def _refusal(self, job: wire.Job, attachment: Attachment | None) -> str | None:
        if attachment is None or attachment.generation is None or attachment.pool is None:
            return "not attached to this lender"
        if job.generation != attachment.generation:
            return f"granted under generation {job.generation}, attached under {attachment.generation}"
        if job.region != attachment.request.lender.region:
            return f"granted in region {job.region}, attached to {attachment.request.lender.region}"
        if len(job.src) != len(job.dst) or not job.src or len(job.src) % 4:
            return f"{len(job.src)} bytes of source pages for {len(job.dst)} of target pages"
        source, target = self._ends(attachment.pool, job.read)
        if not target.pages.flags.writeable:
            return "these pages may be read only"
        if copying.highest(job.src) >= len(source.pages):
            return f"source page outside 0..{len(source.pages) - 1}"
        if copying.highest(job.dst) >= len(target.pages):
            return f"target page outside 0..{len(target.pages) - 1}"
        return None

    def _ends(self, theirs: copying.Pool, read: bool) -> tuple[copying.Pool, copying.Pool]:
        return (theirs, self._own) if read else (self._own, theirs)

    def _copy_some(self) -> None:
        """As many pages as fit in a slice, lender by lender; jobs that end in it are reported in one packet."""
        left, placed = self._slice, []
        while self._busy and left:
            attachment = self._busy[0]
            self._busy.rotate(-1)
            job = attachment.jobs[0]
            assert attachment.pool is not None
            source, target = self._ends(attachment.pool, job.read)
            end = min(job.done + left, job.pages)
            part = slice(4 * job.done, 4 * end)
            self._copy(target, source, job.dst[part], job.src[part])
            left -= end - job.done
            job.done = end
            if end == job.pages:
                attachment.jobs.popleft()
                if not attachment.jobs:
                    self._busy.remove(attachment)
                placed.append(job.id)
        if placed:
            self._report(wire.Placed(placed))
            self._awake_until = time.monotonic() + AWAKE_SECONDS

    def _unfaulted(self) -> Attachment | None:
        for attachment in self._attached.values():
            if attachment.memory is not None and attachment.prefaulted < len(attachment.memory):
                return attachment
        return None

    def _prefault(self) -> None:
        """While idle, map ahead: a first touch costs more than the copy itself."""
        attachment = self._unfaulted()
        if attachment is None or attachment.memory is None:
            return
        start = attachment.prefaulted
        length = min(PREFAULT_BYTES, len(attachment.memory) - start)
        try:
            writable = attachment.request.lender.access != "read"
            attachment.memory.madvise(_MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ, start, length)
            attachment.prefaulted = start + length
        except OSError:  # an older kernel: only slower
            attachment.prefaulted = len(attachment.memory)

    # ------------------------------------------------------------ lenders

    def _attach(self, request: wire.Attach) -> None:
        if request.peer in self._attached:
            self._release(self._attached[request.peer], "attached anew")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(request.lender.path)
        except OSError as error:
            sock.close()
            gone = isinstance(error, (ConnectionRefusedError, FileNotFoundError, PermissionError))
            self._report(wire.Lost(request.peer, f"cannot connect to the lender: {error}", gone))
            return
        attachment = Attachment(request, sock, time.monotonic() + wire.ATTACH_SECONDS)
        self._attached[request.peer] = attachment
        self._watch(sock, lambda: self._on_lender(attachment))
        if wire.peer_credentials(sock)[1] != os.getuid():
            self._lose(attachment, "the lender runs as another user", final=True)
            return
        self._say(attachment, wire.Greet(request.lender.token, request.own_epoch))

    def _say(self, attachment: Attachment, packet: wire.Packet, fds: tuple[int, ...] = ()) -> bool:
        try:
            if wire.send(attachment.sock, packet, fds):
                return True
            self._lose(attachment, "the lender does not read", final=False)
        except wire.Closed as error:
            self._lose(attachment, f"the lender closed: {error}", final=False)
        return False

    def _on_lender(self, attachment: Attachment) -> None:
        try:
            got = wire.receive(attachment.sock, wire.AttachDecoder)
            if got is None:
                return
            try:
                self._on_packet(attachment, got)
            finally:
                wire.close_all(got.fds)
        except wire.Closed as error:
            self._lose(attachment, f"the lender closed: {error}", final=False)
        except (wire.Malformed, ValueError, OSError) as error:
            # Out of memory or descriptors says nothing about the lender: try again. The rest is its doing, and final.
            ours = isinstance(error, OSError) and not isinstance(error, PermissionError)
            self._lose(attachment, f"bad hand-shake: {error}", final=not ours)

    def _on_packet(self, attachment: Attachment, got: wire.Received) -> None:
        match got.packet:
            case wire.Challenge(nonce=nonce) if not attachment.greeted:
                attachment.greeted = True
                self._say(attachment, wire.Answer(nonce), (self._engine,))
            case wire.Memory() as memory if attachment.greeted and attachment.memory is None:
                self._map(attachment, memory, got.fds)
            case wire.TurnedAway(reason=reason, final=final):
                self._lose(attachment, f"turned away: {reason}", final)
            case other:
                raise wire.Malformed(f"unexpected {type(other).__name__}")

    def _map(self, attachment: Attachment, memory: wire.Memory, fds: list[int]) -> None:
        lender = attachment.request.lender
        promised = (lender.region, lender.pages, lender.page_bytes)
        if (memory.region, memory.pages, memory.page_bytes) != promised or len(fds) != 1:
            raise wire.Malformed("the memory differs from the lender's descriptor")
        size = memory.pages * memory.page_bytes
        wire.require_sealed(fds[0], size)
        attachment.memory = mmap.mmap(fds[0], size, mmap.MAP_SHARED, protection(lender.access != "read"))
        attachment.memory.madvise(mmap.MADV_DONTFORK)
        wire.close_all(fds)
        fds.clear()
        pages = np.frombuffer(attachment.memory, np.uint8).reshape(memory.pages, memory.page_bytes)
        attachment.pool = copying.Pool(pages)
        # set before the lender learns of it: its first grant may be on its way at once
        attachment.generation = memory.generation
        attachment.deadline = None
        if self._say(attachment, wire.Mapped(memory.generation)):
            self._report(wire.Attached(attachment.request.peer, memory.generation))

    def _expire(self) -> None:
        now = time.monotonic()
        for attachment in list(self._attached.values()):
            if attachment.deadline is not None and attachment.deadline <= now:
                self._lose(attachment, "the lender did not finish the hand-shake", final=False)

    def _lose(self, attachment: Attachment, reason: str, final: bool) -> None:
        if self._release(attachment, reason):
            self._report(wire.Lost(attachment.request.peer, reason, final))

    def _release(self, attachment: Attachment, reason: str) -> bool:
        """Unmap the lender's pool, then say that its jobs are over."""
        if self._attached.get(attachment.request.peer) is not attachment:
            return False
        del self._attached[attachment.request.peer]
        if attachment in self._busy:
            self._busy.remove(attachment)
        self._epoll.unregister(attachment.sock.fileno())
        del self._handlers[attachment.sock.fileno()]
        attachment.pool = attachment.generation = None
        if attachment.memory is not None:
            attachment.memory.close()
        attachment.sock.close()
        for job in attachment.jobs:
            self._report(wire.Dropped(job.id, reason))
        attachment.jobs.clear()
        return True


def die_with(parent: int) -> int:
    """The kernel kills this process when its engine dies; if that happened before the call, leave now. A pidfd of
    the engine."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, b"quiesce-mover", 0, 0, 0)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
        sys.exit("the mover's engine is gone")
    return os.pidfd_open(parent)  # it is our parent and not reaped: the number is its own


def protection(writable: bool) -> int:
    return mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ


def main(arguments: list[str]) -> None:
    control_fd, own_fd, pages, page_bytes, parent = map(int, arguments[:5])
    engine = die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a stop of the whole group must not end posts before the engine
    memory = mmap.mmap(own_fd, pages * page_bytes, mmap.MAP_SHARED, protection(arguments[5] == "write"))
    memory.madvise(mmap.MADV_DONTFORK)
    os.close(own_fd)
    own = np.frombuffer(memory, np.uint8).reshape(pages, page_bytes)
    control = socket.socket(fileno=control_fd)
    with contextlib.suppress(wire.Closed):
        Mover(control, own, engine).run()


if __name__ == "__main__":
    main(sys.argv[1:])
