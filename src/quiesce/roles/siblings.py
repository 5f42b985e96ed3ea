"""Samples of one prompt on a prefill worker: one computes it, the others copy its pages and draw their own token.

Each sample keeps its own pages, transfer and leases, so nothing about holding changes. A sample that finds no
sibling to copy from computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quiesce.core.messages import TransferId
from quiesce.roles.sequence import Batch, Sequence


@dataclass(eq=False)
class Family:
    eldest: Sequence
    waiting: list[Sequence] = field(default_factory=list)


class Siblings:
    """`copy(eldest, sibling)` moves the prompt's KV from the one's pages into the other's."""

    def __init__(self, batch: Batch, copy: Callable[[Sequence, Sequence], None]) -> None:
        self._batch = batch
        self._copy = copy
        self._families: dict[str, Family] = {}
        self._group_of: dict[TransferId, str] = {}

    def join(self, sequence: Sequence, group: str) -> None:
        """Into the batch, or behind the sibling that is computing the same prompt."""
        family = self._families.get(group)
        if not group or family is None or family.eldest.tokens != sequence.tokens:
            if group and family is None:
                self._families[group] = Family(sequence)
                self._group_of[sequence.tid] = group
            self._batch.add(sequence)
            return
        self._group_of[sequence.tid] = group
        family.waiting.append(sequence)

    def computed(self, eldest: Sequence) -> None:
        """The prompt is computed and its pages are still its own: everyone who waits takes a copy and needs the
        last token only, for logits to draw from."""
        family = self._families.pop(self._group_of.pop(eldest.tid, ""), None)
        for sequence in [] if family is None else family.waiting:
            del self._group_of[sequence.tid]
            self._copy(eldest, sequence)
            sequence.todo = 1
            self._batch.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has ended. When the eldest ends early, the next in line computes the prompt."""
        group = self._group_of.pop(sequence.tid, "")
        family = self._families.get(group)
        if family is None:
            return
        if sequence is not family.eldest:
            family.waiting.remove(sequence)
        elif family.waiting:
            family.eldest = family.waiting.pop(0)
            self._batch.add(family.eldest)
        else:
            del self._families[group]

    def __len__(self) -> int:
        return sum(len(family.waiting) for family in self._families.values())
