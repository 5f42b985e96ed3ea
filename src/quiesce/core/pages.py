"""The page pool: which pages are free. It hands pages out; it has no public way to take one back.

The one way back is claimed once, by the ledger, which uses it only when a page has no owner and no open lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class DoubleReturn(AssertionError):
    """A page came back that was not out: somebody freed by hand."""


class PagePool:
    """`count` equal things (KV pages, host pages, request rows), numbered from 0. O(1) per page."""

    def __init__(self, count: int, name: str = "pages") -> None:
        if count < 1:
            raise ValueError(f"a pool of {count} {name} cannot serve anything")
        self.name = name
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._out = bytearray(count)
        self._claimed = False

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> tuple[int, ...] | None:
        """`n` pages, or None when there are not that many: never a part of them."""
        if n < 0:
            raise ValueError(f"cannot take {n} {self.name}")
        if n > len(self._free):
            return None
        taken = tuple(self._free.pop() for _ in range(n))
        for page in taken:
            self._out[page] = 1
        return taken

    def is_out(self, page: int) -> bool:
        return bool(self._out[page])

    def claim_return(self) -> Callable[[Iterable[int]], None]:
        """The way back, for the one ledger of this pool. A second claim is a bug."""
        if self._claimed:
            raise AssertionError(f"the way back to the {self.name} pool belongs to one ledger only")
        self._claimed = True
        return self._return

    def _return(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._out[page]:
                raise DoubleReturn(f"{self.name} {page} came back but was not out")
            self._out[page] = 0
            self._free.append(page)
