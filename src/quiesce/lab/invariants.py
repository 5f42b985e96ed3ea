"""What must hold in every state: one line of English and one of code each.

Local ones look at one process, global ones at the network too. Liveness is in `checker/liveness.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from quiesce.core import lender as d
from quiesce.core.ledger import Ledger
from quiesce.core.messages import TransferId
from quiesce.core.proofs import Borrowing, LeaseKey
from quiesce.lab.checker.sides import DecodeSide, PrefillSide


def _pages(ledger: Ledger) -> list[int]:
    return [page for holding in ledger._holdings.values() for page in holding.pages]


def _rows(ledger: Ledger) -> list[int]:
    return [row for holding in ledger._holdings.values() for row in holding.rows]


def _lent(ledger: Ledger, tid: TransferId) -> list[LeaseKey]:
    return [key for key in ledger.leases(tid) if key.kind is not Borrowing.RANKS]


LEDGER: dict[str, Callable[[Ledger], bool]] = {
    "no page is free while it belongs to a transfer": lambda x: not set(x.pool._free) & set(_pages(x)),
    "no page belongs to two transfers": lambda x: len(set(_pages(x))) == len(_pages(x)),
    "no row is free, and none is shared, while it belongs to a transfer": lambda x: (
        sorted(_rows(x) + x.rows._free) == list(range(x.rows.count))
    ),
    "pages and row of a transfer are held together": lambda x: all(h.rows for h in x._holdings.values()),
    "free + owned + cached + held + retained = pool": lambda x: (
        (c := x.census()).free + c.owned + c.cached + c.held + c.retained == c.total
    ),
    "every lease ever opened is open or was closed by exactly one proof": lambda x: (
        x.opened == sum(x.closed_by.values()) + x.steps + sum(1 for _ in x.open_leases())
    ),
    "a lease closes by a proof, never by an operator's wish or a timer": lambda x: x.unsound == 0,
}

DECODE: dict[str, Callable[[DecodeSide], bool]] = {
    "a transfer that published nothing is never held": lambda x: (
        not any(t.state is d.State.HOLDING and not t.published for t in x.lender.transfers.values())
    ),
    "a committed request's pages are lent to nobody": lambda x: (
        not any(t.state is d.State.COMMITTED and _lent(x.ledger, tid) for tid, t in x.lender.transfers.items())
    ),
}


def broken(side: DecodeSide | PrefillSide) -> str | None:
    """The first local rule that this process breaks, in words."""
    ledger = side.ledger if isinstance(side, DecodeSide) else side.sources
    for rule, holds in LEDGER.items():
        if not holds(ledger):
            return rule
    if isinstance(side, DecodeSide):
        for rule, keeps in DECODE.items():
            if not keeps(side):
                return rule
    return None


RANKS = (
    "no rank commits what another rank of its engine gives up",
    "ranks of one engine at the same place of its log hold the same transfers and have the same pages free",
)

GLOBAL = (
    "no byte of a transfer lands in a page that another owns, or that a running request reads",
    "no post sends bytes of another request's source page",
    "every byte that may still land is covered by an open lease of its own writer",
    "every source page that a read may still take from is lent to that reader",
    "no request commits with a hole or with another request's bytes",
    "no request commits with a result that is not the designated rank's for it",
    "a request that was given up never commits",
    "a message about a closed transfer changes nothing at the lender",
    "no machine raises",
)
