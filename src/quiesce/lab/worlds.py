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
    drain: bool = False
    digest: bool = False
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
    exact: bool = False  # pacing is state too: timers, ACCEPT, BUSY, retained
    late: bool = False  # answers about closed transfers stay deliverable too (they change nothing: checked here)
    live: bool = False  # search the liveness graph too


WORLDS: tuple[World, ...] = (
    World("abort", "one prefill rank, two requests, a pool for one: abort and an UNKNOWN post", pool=1, unknown=1),
)
