"""The table of small worlds that `quiesce verify` searches to the end.

A world is a cast and a set of budgets. Losing, delaying, repeating and reordering messages is always allowed and
needs no budget; what costs a budget is what would otherwise go on for ever.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    name: str
    about: str
    requests: tuple[int, ...] = (1, 1)  # pages of each; reserved in this order
    prefills: int = 1
    decodes: int = 1
    pool: int = 2  # pages of each decode rank
    sources: int = 2  # pages of each prefill rank
    rows: int = 8
    window: int = 4  # posts a borrower keeps in flight for one transfer
    chunk: int = 1  # pages a chunk
    records: int = 99  # what a prefill rank remembers before it refuses
    # what the transport can prove
    fence: bool = False
    gone: bool = False
    narrow: bool = False  # a fence may also be of one page only
    drain: bool = False
    halves: bool = False  # half of a page lands before the rest, which may never come
    digest: bool = False
    led: bool = False  # a leader decides for all decode ranks
    # pull
    pull: bool = False  # decode reads; `fence` and `gone` are of prefill against its reader, `drain` is decode's
    own_fence: bool = False  # decode can refuse its own reads
    successor: bool = False  # a read of an engine that died is answered by the one that runs there now
    # budgets
    unknown: int = 0  # posts that end UNKNOWN
    failed: int = 0  # posts that end FAILED_CLEAN without a fence
    fault: int = 0  # local failures of a prefill rank
    crash_p: int = 0
    crash_d: int = 0
    suspect: int = 0  # a decode rank gives up on a prefill rank that lives
    unfenced: int = 0  # fences that could not be had, where the transport has fences
    pings: int = 0
    stray: int = 0  # foreign writers found by a digest
    short: int = 0  # a prefill rank plans fewer pages than it was offered
    mispaired: int = 0  # rooms whose request on the prefill side is about another prompt
    exact: bool = False  # pacing is state too: timers, ACCEPT, BUSY, retained
    late: bool = False  # answers about closed transfers stay deliverable too (they change nothing: checked here)
    handshake: bool = False  # HELLO, WELCOME and CONFIRM only
    live: bool = False  # search the liveness graph too


# Searched by `make test` and by a plain `quiesce verify`.
WORLDS: tuple[World, ...] = (
    World(
        "abort",
        "two requests, one page, an UNKNOWN post; every timer and every late message",
        pool=1,
        unknown=1,
        exact=True,
    ),
    World(
        "taint", "two requests, one page, an UNKNOWN post, a drain", pool=1, unknown=1, failed=1, drain=True, pings=1
    ),
    World(
        "chunks",
        "two requests of two chunks, three pages, posted one by one",
        (2, 2),
        pool=3,
        sources=3,
        window=1,
        unknown=1,
        failed=1,
        drain=True,
    ),
    World(
        "together",
        "two requests of two chunks, posted together, few source pages",
        (2, 2),
        pool=3,
        sources=2,
        unknown=1,
        fault=1,
    ),
    World(
        "crash",
        "the prefill engine restarts with bytes in flight; GONE can be had",
        pool=1,
        unknown=1,
        crash_p=1,
        gone=True,
    ),
    World(
        "crash fence",
        "the same with a fence that may be refused",
        pool=1,
        unknown=1,
        crash_p=1,
        fence=True,
        unfenced=1,
    ),
    World("crash twice", "the prefill engine restarts twice, no proof can be had", pool=1, crash_p=2),
    World("restart", "the decode engine restarts under posts in flight", pool=1, unknown=1, crash_d=1, fence=True),
    World("both", "both engines restart", pool=1, crash_d=1, crash_p=1, gone=True),
    World(
        "fence",
        "fences that take effect, are refused, and are reported late",
        pool=1,
        unknown=1,
        fence=True,
        unfenced=1,
        suspect=1,
    ),
    World(
        "halves",
        "half of each page lands first: a failure, an UNKNOWN post, a crash, a fence",
        pool=1,
        unknown=1,
        failed=1,
        crash_p=1,
        fence=True,
        halves=True,
    ),
    World("narrow", "fences of one page of two", (2, 2), window=1, fence=True, narrow=True, unknown=1),
    World("shared", "a fence that hits a good transfer of the same engine", pool=2, unknown=1, fence=True),
    World("pings", "closed sets, lost answers, a failure", pool=1, unknown=1, failed=1, pings=2, drain=True),
    World(
        "digest",
        "a foreign writer, found by a digest",
        pool=1,
        unknown=1,
        digest=True,
        stray=1,
        fence=True,
        suspect=1,
    ),
    World("short", "a prefill engine that plans fewer pages, one that fails", (2, 2), short=1, fault=1),
    World("mispaired", "a room whose two legs are about different prompts", pool=1, mispaired=1, unknown=1),
    World("full", "a prefill engine that remembers one transfer", (1, 1, 1), pool=1, records=1, pings=1, fault=1),
    World("ranks", "two prefill ranks, a failed post", prefills=2, pool=1, failed=1),
    World("decodes", "two decode ranks", requests=(1,), pool=1, decodes=2, unknown=1, drain=True),
    World(
        "led",
        "two decode ranks under one leader, a failure, an UNKNOWN post",
        (1,),
        pool=1,
        decodes=2,
        fault=1,
        unknown=1,
        led=True,
    ),
    World("led two", "two decode ranks under one leader, two requests", pool=1, decodes=2, led=True),
    World(
        "led fence",
        "two decode ranks under one leader, of which one suspects; a fence",
        (1,),
        pool=1,
        decodes=2,
        suspect=1,
        unknown=1,
        fence=True,
        led=True,
    ),
    World(
        "led crash",
        "two decode ranks under one leader, the prefill engine restarts; GONE can be had",
        (1,),
        pool=1,
        decodes=2,
        crash_p=1,
        gone=True,
        led=True,
    ),
    World(
        "led digest",
        "two decode ranks under one leader, a foreign writer at one of them",
        (1,),
        pool=1,
        decodes=2,
        digest=True,
        stray=1,
        fence=True,
        led=True,
    ),
    World(
        "led restart",
        "two decode ranks under one leader restart",
        pool=1,
        decodes=2,
        crash_d=1,
        requests=(1,),
        led=True,
    ),
    World(
        "three",
        "three requests, two pages, a prefill crash, an UNKNOWN post",
        (1, 1, 1),
        pool=2,
        unknown=1,
        crash_p=1,
        gone=True,
    ),
    World(
        "thirds",
        "two requests of three chunks, posted two at a time; an UNKNOWN post, a failure",
        (3, 3),
        pool=4,
        sources=3,
        window=2,
        unknown=1,
        fault=1,
    ),
    World(
        "pull",
        "decode reads: two requests, one source page, an UNKNOWN read, a fence of its own",
        sources=1,
        unknown=1,
        own_fence=True,
        pull=True,
    ),
    World(
        "pull halves",
        "half of each page that is read lands first; a failed read, an UNKNOWN one, a restart of either side",
        (1,),
        pool=1,
        sources=1,
        unknown=1,
        failed=1,
        crash_p=1,
        crash_d=1,
        successor=True,
        own_fence=True,
        gone=True,
        halves=True,
        pull=True,
    ),
    World("pull late", "two requests, one source page; every late message", sources=1, late=True, pull=True),
    World(
        "pull fence",
        "prefill fences its reader, or cannot, or suspects it falsely; a drain",
        pool=1,
        sources=1,
        unknown=1,
        fence=True,
        unfenced=1,
        suspect=1,
        drain=True,
        pull=True,
    ),
    World(
        "pull crash",
        "the prefill engine restarts under a read, which its successor answers",
        pool=1,
        sources=1,
        unknown=1,
        crash_p=1,
        successor=True,
        fence=True,
        pull=True,
    ),
    World("pull crash two", "the same with both requests at once", sources=1, crash_p=1, successor=True, pull=True),
    World(
        "pull restart",
        "the decode engine restarts while it reads; GONE can be had",
        sources=1,
        unknown=1,
        crash_d=1,
        gone=True,
        pull=True,
    ),
    World("pull both", "both engines restart", sources=1, crash_d=1, crash_p=1, gone=True, successor=True, pull=True),
    World(
        "pull chunks",
        "reads of one page each, one by one; a failed one, an UNKNOWN one, a failure of prefill",
        (2, 1),
        pool=3,
        window=1,
        unknown=1,
        failed=1,
        fault=1,
        drain=True,
        pull=True,
    ),
    World("pull pings", "closed sets, lost answers", pool=1, sources=1, unknown=1, pings=2, pull=True),
    World(
        "pull ranks",
        "two prefill ranks to read from, a failed read, a fence",
        (1,),
        pool=1,
        sources=1,
        prefills=2,
        failed=1,
        fence=True,
        pull=True,
    ),
    World(
        "pull ranks crash",
        "two prefill ranks to read from, one restarts",
        (1,),
        pool=1,
        sources=1,
        prefills=2,
        crash_p=1,
        successor=True,
        pull=True,
    ),
    World("handshake", "two processes that restart, every old HELLO", pings=2, crash_d=1, crash_p=1, handshake=True),
    World(
        "left alone",
        "liveness: failures, an UNKNOWN post and a drain",
        pool=1,
        failed=1,
        unknown=1,
        drain=True,
        live=True,
    ),
    World(
        "left crash",
        "liveness: both engines restart",
        (1,),
        pool=1,
        unknown=1,
        crash_p=1,
        crash_d=1,
        gone=True,
        live=True,
    ),
    World(
        "left fence",
        "liveness: fences refused, then had; a false alarm",
        (1,),
        pool=1,
        unknown=1,
        fence=True,
        unfenced=2,
        suspect=1,
        live=True,
    ),
    World("left narrow", "liveness: fences of one page of two", (2,), fence=True, narrow=True, unknown=1, live=True),
    World("left ranks", "liveness: two prefill ranks, a failure", (1,), pool=1, prefills=2, fault=1, live=True),
    World("left decodes", "liveness: two decode ranks", (1,), pool=1, decodes=2, fault=1, live=True),
    World(
        "left led",
        "liveness: two decode ranks under one leader, a failure",
        (1,),
        pool=1,
        decodes=2,
        fault=1,
        led=True,
        live=True,
    ),
    World(
        "left pull",
        "liveness: two pulls, failures, an UNKNOWN read and a drain",
        sources=1,
        unknown=1,
        failed=1,
        fault=1,
        drain=True,
        pull=True,
        live=True,
    ),
    World(
        "left pull fence",
        "liveness: prefill's fence of its reader refused, then had; a false alarm",
        (1,),
        sources=1,
        unknown=1,
        fence=True,
        unfenced=2,
        suspect=1,
        pull=True,
        live=True,
    ),
    World(
        "left pull crash",
        "liveness: both engines restart in a pull",
        (1,),
        sources=1,
        unknown=1,
        crash_p=1,
        crash_d=1,
        gone=True,
        successor=True,
        pull=True,
        live=True,
    ),
)
