"""The pool against a model: what is out is out once, and only what was handed out comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quiesce.core.pages import DoubleReturn, PagePool

picks = st.integers(0, 1 << 16)


class PoolMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 40))
    def start(self, count: int) -> None:
        self.pool = PagePool(count)
        self.give_back = self.pool.claim_return()
        self.out: list[tuple[int, ...]] = []
        self.returned: list[tuple[int, ...]] = []

    @rule(n=st.integers(0, 45))
    def take(self, n: int) -> None:
        room = self.pool.free
        taken = self.pool.take(n)
        assert (taken is None) == (n > room)
        if taken is not None:
            assert len(taken) == len(set(taken)) == n and all(0 <= page < self.pool.count for page in taken)
            assert not set(taken) & {page for other in self.out for page in other}
            self.out.append(taken)

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def give(self, pick: int) -> None:
        taken = self.out.pop(pick % len(self.out))
        self.give_back(taken)
        self.returned.append(taken)

    @precondition(lambda self: any(self.returned))
    @rule(pick=picks)
    def give_twice(self, pick: int) -> None:
        """Refused, also when the pages are out again, for somebody else."""
        again = [taken for taken in self.returned if taken]
        with pytest.raises(DoubleReturn):
            self.give_back(again[pick % len(again)])

    @precondition(lambda self: any(self.out))
    @rule(pick=picks, cut=st.integers(0, 3))
    def give_otherwise(self, pick: int, cut: int) -> None:
        """A part of it, in another order, or an equal one that was not handed out."""
        taken = next(taken for taken in self.out if taken)
        other = (taken[:-1], taken[::-1], (*taken,), (*taken, self.pool.count))[cut]
        if other and other is not taken:
            with pytest.raises(DoubleReturn):
                self.give_back(other)

    @rule()
    def claim_again(self) -> None:
        with pytest.raises(AssertionError, match="one ledger only"):
            self.pool.claim_return()

    @invariant()
    def every_page_is_free_or_out_once(self) -> None:
        out = [page for taken in self.out for page in taken]
        assert sorted(self.pool.out()) == sorted(out)
        assert self.pool.free + len(out) == self.pool.count
        assert sorted([*self.pool._free, *out]) == list(range(self.pool.count))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_of_nothing_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        PagePool(count)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take -1 rows"):
        PagePool(2, "rows").take(-1)
