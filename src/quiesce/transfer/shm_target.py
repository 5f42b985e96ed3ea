"""One lender as the posting side keeps it, and why a post to it would be refused."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec

from quiesce.core.messages import Grant
from quiesce.transfer import mover_wire as wire
from quiesce.transfer.interface import Arena, Peer, Post

_DescriptorDecoder = msgspec.msgpack.Decoder(wire.Descriptor)


@dataclass
class Sum:
    """One post: how many of its jobs are not over, and whether one failed. No outcome before `left` is 0."""

    post: Post
    left: int
    failed: bool = False
    started: bool = False


@dataclass
class Target:
    """One connection as the poster keeps it."""

    peer: Peer
    request: wire.Attach
    queue: deque[wire.Job] = field(default_factory=deque)  # not yet with the mover
    at_mover: int = 0
    open_posts: int = 0
    generation: int = 0  # of the last attachment
    attached: bool = False
    retry_at: float | None = None
    tries: int = 0
    granted: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())  # of the last post
    over: bool = False  # disconnected, or the lender is gone for good


def read_descriptor(descriptor: bytes, page_bytes: int) -> wire.Descriptor:
    """Raises ValueError for one that pages of `page_bytes` cannot be moved with."""
    try:
        lender = _DescriptorDecoder.decode(descriptor)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not the descriptor of a shm transport: {error}") from error
    if lender.kind != "shm" or not lender.path.startswith("/") or "\0" in lender.path:
        raise ValueError(f"not the descriptor of a shm transport on this machine: {lender.kind!r}")
    if lender.page_bytes != page_bytes:
        raise ValueError(f"pages of {lender.page_bytes} bytes there, {page_bytes} here")
    if not 1 <= lender.pages < 2**31:
        raise ValueError(f"a lender cannot have {lender.pages} pages")
    return lender


def refusal_of(
    state: Target | None, arena: Arena, own: array[int], theirs: array[int], grant: Grant, read: bool
) -> str | None:
    """`own`: page numbers in our pool; `theirs`: in the lender's, which the grant must list."""
    if state is None or state.over:
        return "the connection is closed or its lender is gone"
    lender = state.request.lender
    if lender.access not in ("both", "read" if read else "write"):
        return f"the lender lets its pages be {'written' if lender.access == 'write' else 'read'} only"
    if len(own) != len(theirs):
        return f"{len(own)} pages of ours for {len(theirs)} of the lender"
    if own and (min(own) < 0 or max(own) >= arena.count):
        return f"a page of ours is outside 0..{arena.count - 1}"
    if theirs and (min(theirs) < 0 or max(theirs) >= lender.pages):
        return f"a page of the lender is outside 0..{lender.pages - 1}"
    if state.granted[0] is not grant.pages:  # posts of one transfer come one after the other
        state.granted = (grant.pages, frozenset(grant.pages))
    if not state.granted[1].issuperset(theirs):
        return "a page is not in the grant"
    return None
