"""Guard D6: holds have budgets of pages and of rows, in all and for each tenant; time is a number here."""

from __future__ import annotations

import pytest

from quiesce.core.ledger import Change
from quiesce.core.messages import TransferId
from quiesce.roles.budgets import GRACE, HoldBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def budget(pages: int = 100, rows: int = 8, share: float = 0.5) -> tuple[HoldBudget, Clock]:
    clock = Clock()
    return HoldBudget(pages, rows, share, clock), clock


def hold(book: HoldBudget, seq: int, pages: int, tenant: str = "") -> TransferId:
    """An ended request whose pages wait for proof."""
    tid = TransferId(1, seq)
    book.belongs(tid, tenant)
    book.observe(Change("ended", tid, range(pages)))
    return tid


@pytest.mark.parametrize(("count", "pages"), [(2, 50), (8, 1)], ids=["pages", "rows"])
def test_d6_a_budget_that_is_used_up_refuses_everybody_and_says_of_what(count: int, pages: int) -> None:
    book, clock = budget()
    held = [hold(book, seq, pages) for seq in range(count)]
    assert book.exhausted("a") is None, "a burst of aborts that is answered at once refuses nobody"
    clock.now += 2 * GRACE
    why = book.exhausted("a")
    assert why is not None and why == book.exhausted("")
    assert f"{count * pages} pages of {count} ended requests" in why and "100 pages or 8 requests" in why
    book.observe(Change("returned", held[0], range(pages)))
    assert book.exhausted("a") is None, "the first page that comes back lets the next one in"
    assert book.refused == {"all": 2, "tenant": 0}


@pytest.mark.parametrize(("count", "pages"), [(2, 25), (4, 1)], ids=["pages", "rows"])
def test_d6_a_tenant_uses_up_its_own_share_and_no_others(count: int, pages: int) -> None:
    book, clock = budget()
    held = [hold(book, seq, pages, "a") for seq in range(count)]
    clock.now += 2 * GRACE
    why = book.exhausted("a")
    assert why is not None and "of this API key" in why and "50 pages or 4 requests" in why
    assert book.exhausted("b") is None and book.exhausted("") is None
    assert book.refused == {"all": 0, "tenant": 1}
    assert book.by_tenant() == {"a": count * pages}
    for tid in held:
        book.observe(Change("returned", tid, range(pages)))
    assert book.exhausted("a") is None and book.by_tenant() == {}


def test_d6_what_has_no_tenant_counts_in_all_alone() -> None:
    book, clock = budget(rows=8)
    for seq in range(7):
        hold(book, seq, 1)
    hold(book, 7, 1, "a")
    clock.now += 2 * GRACE
    assert book.exhausted("b") is not None, "everybody's is used up"
    assert book.by_tenant() == {"": 7, "a": 1}


def test_d6_only_holds_that_last_count() -> None:
    """Those of the last second are what every abort costs."""
    book, clock = budget(rows=4, share=1.0)
    for seq in range(3):
        hold(book, seq, 1, "a")
    clock.now += 2 * GRACE
    hold(book, 3, 1, "a")
    assert book.exhausted("a") is None
    clock.now += 2 * GRACE
    assert book.exhausted("a") is not None


def test_d6_nothing_is_remembered_of_what_was_returned() -> None:
    book, _ = budget()
    for seq in range(1000):
        tid = TransferId(1, seq)
        book.belongs(tid, "a")
        if seq % 2:
            book.observe(Change("ended", tid, range(3)))
        book.observe(Change("returned", tid, range(3)))
    assert not book._tenants and not book._held
