"""What a transport is: it moves page lists between registered arenas and says what it can prove.

The one rule behind every type here: success can be trusted, failure cannot. A post therefore ends in one of
three `Outcome`s, and only two of them say that nothing more of it will land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome

Access = Literal["write", "read"]  # what a peer may do with pages that are lent to it: push, pull


@dataclass(frozen=True)
class Capabilities:
    """What one lane of an engine was measured to do. What was not measured is `none`."""

    name: str  # of the engine: shm, tcp, nixl ...
    push: bool
    pull: bool
    gather: bool  # many pages in one post
    notify: bool
    failure_is_terminal: bool  # a reported failure proves that nothing lands later
    cancels_queued: bool
    blocking_post: bool
    drain: Literal["none", "per_post", "flush"]
    fence: Literal["none", "page", "peer", "region", "death"]
    fence_cost: Literal["none", "us", "ms", "disrupts_peer", "disrupts_all"]
    placed_means: Literal["visible", "accepted"]  # "accepted" needs consume_barrier before reading
    lane: str = ""  # what carries the bytes, pinned: cma, tcp, rc ...; empty where an engine has one only
    fences_readers: bool = True  # `fence` holds against a peer that reads from us as well
    measured: bool = True  # by the conformance suite on this version; False: read in its source, or assumed

    @property
    def label(self) -> str:
        return f"{self.name}/{self.lane}" if self.lane else self.name


@dataclass
class Arena:
    """A run of equally sized pages. `pages[i]` is page i as bytes; `fd` is set where memory can be shared."""

    pages: np.ndarray  # uint8 [count, page_bytes], C-contiguous
    fd: int | None = None

    @property
    def count(self) -> int:
        return int(self.pages.shape[0])

    @property
    def page_bytes(self) -> int:
        return int(self.pages.shape[1])


@dataclass(frozen=True)
class Region:
    id: int
    pages: int
    page_bytes: int


@dataclass(frozen=True)
class Peer:
    """A connection to one lender process, valid for that epoch only."""

    epoch: int
    number: int  # local, never reused


@dataclass(frozen=True)
class Post:
    """One posted write or read of pages of one grant. Owned until its outcome is known; never dropped."""

    id: int
    peer: Peer


@dataclass(frozen=True)
class FenceProof:
    """Our transport's word: nothing of `peer_epoch` under a generation <= `generation` touches any page of ours any
    more; where `pages` is set, none of those pages."""

    kind: Literal["fenced", "gone"]
    peer_epoch: int
    generation: int
    pages: frozenset[int] | None = None


@dataclass(frozen=True)
class PeerLost:
    """Reported by `events()`: the peer can no longer be served by this connection. `final`: nor by another one,
    its process has gone; otherwise the transport goes on trying to connect."""

    peer_epoch: int
    generation: int
    reason: str
    final: bool = False


class Transport(Protocol):
    """Single-threaded: one thread calls every method. Nothing blocks for longer than the `blocking_post`
    capability says. `fileno()` becomes readable when `poll` or `events` has something or some work to do;
    after it did, call both. Work is done inside `poll` and `events` and nowhere else.

    Engines derive from this class: methods that have a body here are right for an engine that knows nothing better.
    """

    caps: Capabilities

    def fileno(self) -> int: ...
    def close_all(self) -> None:
        """Stop posting, let go of peers, remove files. Posts still open are told to `poll` one last time. It
        proves nothing to the lender's pages: they are not to be used afterwards."""

    def self_test(self) -> list[str]:
        """Tries at start-up, before `register`, against scratch memory of its own, what can be tried without a peer:
        capabilities claimed, libraries, the engine's own timeouts. Each entry is one thing that does not hold, for
        people; empty: all does. Takes as long as it must on a busy machine, half a minute where something fails."""
        return []

    def used_up(self) -> str | None:
        """Why it takes no more peers until its process ends, for people; None: it does take them."""
        return None

    def counters(self) -> dict[str, int]:
        """Totals since the start, for the metrics."""
        return {}

    def report(self) -> dict[str, Any]:
        """JSON-able, for /health and `quiesce doctor`."""
        return {"engine": self.caps.label, **asdict(self.caps), "counters": self.counters()}

    def picks(self) -> tuple[str, ...]:
        """Where there are several engines: for people, which ones the peers in use have, and why."""
        return ()

    # -- the side whose memory is touched
    def register(self, arena: Arena) -> Region:
        """Both sides call it once, before `descriptor` or `connect`. Raises ValueError for an unfit arena."""

    def descriptor(self, peer_epoch: int | None = None) -> bytes:
        """Opaque and secret: who holds it may ask to be attached. Valid for this process only. An engine may keep
        something of its own for each peer: then it is that peer's, and asked for again for every HELLO, so that what
        a fence has rebuilt is announced anew. None: where no peer is meant yet."""

    def reply(self, peer_epoch: int, descriptor: bytes, *, pull: bool = False) -> bytes:
        """What WELCOME answers to the descriptor of a HELLO: in pull the descriptor to read from. Raises ValueError
        for a descriptor that does not fit."""
        return self.descriptor(peer_epoch) if pull else b""

    def settle(self, peer_epoch: int, reply: bytes) -> None:
        """The other side's `reply`, heard in WELCOME, each time anew. Raises ValueError for one that does not fit."""
        return

    def generation(self, peer_epoch: int) -> int | None:
        """The newest generation of this peer; None while it is not attached. Rises with each attachment and is never
        reused."""

    def lend(
        self, peer_epoch: int, pages: Sequence[int], *, access: Access = "write", generation: int | None = None
    ) -> int | None:
        """From now on the peer may touch these pages, and what the grant is to carry is returned: the generation.
        None: it is not attached. Engines that check pages at placement refuse all that was not lent, and their
        generations rise with each call. `generation`: where the core has numbered the grant itself, as in pull."""
        return generation if generation is not None else self.generation(peer_epoch)

    def withdraw(self, peer_epoch: int, generation: int) -> None:
        """The lease of that grant is closed with proof. What comes under it all the same is refused and counted
        where the engine checks pages. Proves nothing by itself."""
        return

    def fence(
        self, peer_epoch: int, generation: int | None = None, pages: frozenset[int] | None = None
    ) -> FenceProof | None:
        """Revoke every access granted to the peer under generations <= `generation` (None: up to now): posts
        in flight and later ones, and our own reads from it into our pages. `pages`: only those have to be safe, and
        an engine whose fence is `page` disturbs no others; the proof of any other engine is wider than asked for.
        None: cannot, or not yet: ask again with the same arguments after the next `PeerLost`; a peer that has
        attached anew since is not hit a second time."""

    def gone(self, peer_epoch: int) -> FenceProof | None:
        """Proof that whatever copied for this peer, up to the generation named in the proof, is dead with
        nothing in flight. Closes leases of those generations only. None: not shown."""

    def consume_barrier(self, pages: Sequence[int]) -> None:
        """Before pages that were PLACED are read, and before a proof frees any."""

    # -- both sides
    def events(self) -> list[PeerLost]:
        """Lender: an attachment ended; told again when its proof can be had. Poster: a lender was lost."""

    # -- the side that posts
    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        """Starts attaching and returns at once; the lender's `generation` tells when it has happened. Kept
        up until `disconnect`: lost attachments are made anew. The same descriptor gives the same Peer.
        Raises ValueError for a descriptor that does not fit."""

    def write(self, peer: Peer, src_pages: Sequence[int], dst_pages: Sequence[int], grant: Grant) -> Post:
        """Copy own page `src_pages[i]` to the peer's `dst_pages[i]`, which `grant` must list. What is refused
        ends FAILED_CLEAN with nothing touched. Posts to one peer are placed in the order posted. The first failure
        ends a post: what follows in it is not written."""

    def read(self, peer: Peer, dst_pages: Sequence[int], src_pages: Sequence[int], grant: Grant) -> Post:
        """Pull, where `caps.pull`: copy the peer's page `src_pages[i]`, which `grant` must list, to own
        `dst_pages[i]`. Ends like a write; PLACED: the bytes are here, as they were at the source when it was read."""
        raise RuntimeError(f"{self.caps.label} cannot read from a peer")

    def poll(self) -> list[tuple[Post, Outcome]]:
        """Posts that ended, each once. A post still running is not in the list."""

    def try_cancel(self, post: Post) -> bool:
        """True: proven never started, and over: `poll` will not name it any more."""

    def drain(self, peer: Peer) -> bool:
        """True: everything posted earlier on this connection has landed or never will. Asked of connections that
        were ended since as well."""

    def disconnect(self, peer: Peer) -> None:
        """No more posts. What is in flight still ends through `poll`."""
