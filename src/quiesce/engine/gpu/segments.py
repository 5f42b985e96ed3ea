"""The rows of a step as paged attention takes them: queries one after the other, and each row's page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from quiesce.engine.batch import Row


@dataclass(frozen=True)
class Segment:
    """Rows whose flat tokens are first..last: either all of one token or none.

    `tables` int32 [rows, pages], padded with a page of the row's own; `ends` int32 [rows]: keys of each, its new ones
    included; `offsets` int32 [rows + 1]: where each row's queries begin, counted from `first`; `longest`: most
    queries of one row. `host` has (tables, ends, offsets) for backends that plan on the host.
    """

    first: int
    last: int
    tables: torch.Tensor
    ends: torch.Tensor
    offsets: torch.Tensor
    longest: int
    host: tuple[np.ndarray, np.ndarray, np.ndarray]


def segments(rows: Sequence[Row], page_size: int, singles: int, device: torch.device) -> list[Segment]:
    """Of rows in the order of their flat tokens, the first `singles` of one token each."""
    found, at = [], 0
    for members in (rows[:singles], rows[singles:]):
        if members:
            made = segment(members, page_size, at, device)
            found.append(made)
            at = made.last
    return found


def segment(rows: Sequence[Row], page_size: int, first: int, device: torch.device) -> Segment:
    counts = [len(row.tokens) for row in rows]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    ends = np.array([row.end for row in rows], np.int32)
    tables = page_tables(rows, page_size)
    there = [torch.from_numpy(array).to(device) for array in (tables, ends, offsets)]
    return Segment(
        first, first + int(offsets[-1]), there[0], there[1], there[2], max(counts), (tables, ends, offsets)
    )


def page_tables(rows: Sequence[Row], page_size: int) -> np.ndarray:
    """int32 [rows, pages of the longest], padded with each row's own first page: whatever is read is its own."""
    used = [-(-row.end // page_size) for row in rows]
    tables = np.empty((len(rows), max(used)), np.int32)
    for line, row, count in zip(tables, rows, used, strict=True):
        line[:count] = row.pages[:count]
        line[count:] = row.pages[0]
    return tables
