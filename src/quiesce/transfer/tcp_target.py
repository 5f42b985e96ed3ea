"""One lender as a poster of tcp keeps it: how it is reached, and how a post becomes jobs for its lanes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import msgspec

from quiesce.core.messages import Grant
from quiesce.transfer import tcp_wire as wire
from quiesce.transfer.interface import Arena, Peer
from quiesce.transfer.tcp_lane import Job, Lane, Sum
from quiesce.transfer.tcp_pages import Pool
from quiesce.transfer.tcp_stream import Gate
from quiesce.transfer.tcp_wire import Kind

STRIPE_BYTES, STRIPE_PAGES = 256 << 10, 8  # at most so much of a pool is one lane's; then it is the next one's turn

_CHOSEN = [bytes(lane == each for each in range(256)) for lane in range(wire.MAX_LANES)]  # tables: 1 for that lane

_DescriptorDecoder = msgspec.msgpack.Decoder(wire.Descriptor)


@dataclass(eq=False)
class Target:
    """One lender. `over`: no more posts; it stays until what was sent has ended."""

    peer: Peer
    lender: wire.Descriptor
    own_epoch: int
    lanes: list[Lane] = field(default_factory=list)
    attachment: int = 0
    generation: int = 0
    up: set[int] = field(default_factory=set)  # lanes of the attachment that stand
    losing: str | None = None  # why, while the lanes of a lost attachment end
    final: bool = False
    granted: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())  # of the last post
    over: bool = False
    reads: bool = False
    retry_at: float | None = None
    tries: int = 0
    unsettled: list[Job] = field(default_factory=list)  # sent on an attachment that was lost
    posts: deque[Sum] = field(default_factory=deque)  # in the order posted: their ends are told in it

    @property
    def attached(self) -> bool:
        return len(self.up) == self.lender.lanes and self.losing is None


def read_descriptor(descriptor: bytes, arena: Arena, tls: bool) -> wire.Descriptor:
    try:
        lender = _DescriptorDecoder.decode(descriptor)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not the descriptor of a tcp transport: {error}") from error
    if lender.kind != "tcp" or not 0 < lender.port < 1 << 16 or not 1 <= lender.lanes <= wire.MAX_LANES:
        raise ValueError(f"not the descriptor of a tcp transport: {lender.kind!r}, port {lender.port}")
    if lender.page_bytes != arena.page_bytes:
        raise ValueError(f"pages of {lender.page_bytes} bytes there, {arena.page_bytes} here")
    if not 1 <= lender.pages < 2**31:
        raise ValueError(f"a lender cannot have {lender.pages} pages")
    if lender.tls != tls:
        here, there = ("with", "without") if tls else ("without", "with")
        raise ValueError(f"tcp {there} TLS there, {here} TLS here: give both sides --transfer-tls-cert, or neither")
    return lender


def refusal(target: Target, own_pages: int, own: Sequence[int], remote: Sequence[int], grant: Grant) -> str | None:
    if target.over:
        return "the connection is closed or its lender is gone"
    if not target.lanes or target.losing is not None:
        return "the connection is being made anew"
    if len(own) != len(remote):
        return f"{len(own)} own pages for {len(remote)} of the peer's"
    if len(own) and (min(own) < 0 or max(own) >= own_pages):
        return f"a page is outside 0..{own_pages - 1}"
    if len(remote) and (min(remote) < 0 or max(remote) >= target.lender.pages):
        return f"a page of the peer's is outside 0..{target.lender.pages - 1}"
    if target.granted[0] is not grant.pages:  # posts of one transfer come one after the other
        target.granted = (grant.pages, frozenset(grant.pages))
    if not target.granted[1].issuperset(remote):
        return "a page is not in the grant"
    return None


def split(
    pool: Pool,
    most: int,
    ids: Iterator[int],
    total: Sum,
    kind: Kind,
    lanes: Sequence[Lane],
    own: Sequence[int],
    remote: Sequence[int],
    grant: Grant,
) -> list[tuple[Lane, Job]]:
    """Each lane's share in jobs of at most `most` pages (guard L8). Pages change lanes by stripes, so that neighbours
    go in one piece and a small post wakes one thread."""
    stripe, count = max(1, min(STRIPE_PAGES, STRIPE_BYTES // pool.page_bytes)), len(lanes)
    lane_of = bytes([page // stripe % count for page in (remote if kind is Kind.WRITE else own)])
    jobs = []
    for lane, chosen in zip(lanes, _CHOSEN, strict=False):
        mine = lane_of.translate(chosen)
        here, there = tuple(compress(own, mine)), tuple(compress(remote, mine))
        for start in range(0, len(here), most):
            part, numbers = here[start : start + most], there[start : start + most]
            travels = struct.pack(f"<{len(numbers)}I", *numbers)
            job = Job(next(ids), total, kind, grant.region, grant.generation, travels, pool, part)
            if kind is Kind.READ:
                job.gate = Gate(frozenset(part))
            jobs.append((lane, job))
    return jobs
