"""What ended requests may keep while they wait for proof: pages and rows, in all and for each tenant (guard D6).

When it is used up new work is refused and told when to come back; what runs goes on. Holds usually last milliseconds:
only those that have lasted longer than `GRACE` count, so that a burst of aborts refuses nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quiesce.core.ledger import Change
from quiesce.core.messages import TransferId

GRACE = 1.0  # seconds


@dataclass
class HoldBudget:
    """An observer of the ledger. A request without a tenant only counts in all. `tenant_share`: of pages and rows."""

    pages: int
    rows: int
    tenant_share: float
    now: Callable[[], float]
    refused: Counter[str] = field(default_factory=lambda: Counter({"all": 0, "tenant": 0}))
    _tenants: dict[TransferId, str] = field(default_factory=dict)  # of holdings that have one, ended or not
    _held: dict[TransferId, tuple[float, int]] = field(default_factory=dict)  # since when, pages; the oldest first

    def belongs(self, tid: TransferId, tenant: str) -> None:
        if tenant:
            self._tenants[tid] = tenant

    def observe(self, change: Change) -> None:
        if change.event == "ended":
            self._held[change.tid] = (self.now(), len(change.pages))
        elif change.event == "returned":
            self._held.pop(change.tid, None)
            self._tenants.pop(change.tid, None)

    def _waiting(self, tenant: str | None = None) -> tuple[int, int]:
        """Pages and rows that have been held for long, of one tenant or of all."""
        pages = rows = 0
        for tid, (since, count) in self._held.items():
            if since > self.now() - GRACE:
                break
            if tenant is None or self._tenants.get(tid) == tenant:
                pages, rows = pages + count, rows + 1
        return pages, rows

    def exhausted(self, tenant: str) -> str | None:
        """Why nothing new of this tenant is let in, or None."""
        for name, share, whose in (
            ("all", 1.0, "ended requests"),
            ("tenant", self.tenant_share, "ended requests of this API key"),
        ):
            if name == "tenant" and not tenant:
                break
            pages, rows = self._waiting(tenant if name == "tenant" else None)
            most_pages, most_rows = self.pages * share, self.rows * share
            if pages >= most_pages or rows >= most_rows:
                self.refused[name] += 1
                most = f"{most_pages:.0f} pages or {most_rows:.0f} requests"
                return f"{pages} pages of {rows} {whose} wait for proof, and no more than {most} may"
        return None

    def by_tenant(self) -> dict[str, int]:
        """Held pages of each tenant that has some."""
        found: Counter[str] = Counter()
        for tid, (_, count) in self._held.items():
            found[self._tenants.get(tid, "")] += count
        return dict(found)
