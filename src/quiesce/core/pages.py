"""The page pool: which pages are free. It hands pages out; it has no public way to take one back.

The one way back is claimed once, by the ledger, which uses it only when a page has no owner and no open lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator


class DoubleReturn(AssertionError):
    """Pages came back that were not out, or not as they went: somebody freed by hand."""


class PagePool:
    """`count` equal things (KV pages, host pages, request rows), numbered from 0. What is taken together comes back
    together, as the very tuple that was handed out: to take, to return and to notice a wrong return are each one
    step over a list, however large the pool is."""

    def __init__(self, count: int, name: str = "pages") -> None:
        if count < 1:
            raise ValueError(f"a pool of {count} {name} cannot serve anything")
        self.name = name
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._out: dict[int, tuple[int, ...]] = {}  # by the first of them
        self._claimed = False

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> tuple[int, ...] | None:
        """`n` pages, or None when there are not that many: never a part of them."""
        if n < 0:
            raise ValueError(f"cannot take {n} {self.name}")
        left = len(self._free) - n
        if left < 0:
            return None
        if not n:
            return ()
        taken = tuple(self._free[: left - len(self._free) - 1 : -1])
        del self._free[left:]
        self._out[taken[0]] = taken
        return taken

    def out(self) -> Iterator[int]:
        """Every page that is not free (for looking; linear)."""
        for taken in self._out.values():
            yield from taken

    def claim_return(self) -> Callable[[tuple[int, ...]], None]:
        """The way back, for the one ledger of this pool. A second claim is a bug."""
        if self._claimed:
            raise AssertionError(f"the way back to the {self.name} pool belongs to one ledger only")
        self._claimed = True
        return self._return

    def _return(self, taken: tuple[int, ...]) -> None:
        if not taken:
            return
        if self._out.get(taken[0]) is not taken:
            raise DoubleReturn(f"{self.name} {_shown(taken)} came back but were not out like this")
        del self._out[taken[0]]
        self._free.extend(taken[::-1])  # so that they go out again in the order in which they lie


def _shown(pages: tuple[int, ...]) -> str:
    return ", ".join(map(str, pages[:8])) + (f" and {len(pages) - 8} more" if len(pages) > 8 else "")
