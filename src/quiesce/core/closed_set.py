"""The closed set: how the side that mints ids says which of them are over, and what the other side makes of it.

Every seq up to `high` that is not listed is closed for ever (guards N5, N9). In push and in pull it is decode that
mints, and one process has one sequence of ids, whatever it uses them for.
"""

from __future__ import annotations

from collections.abc import Iterable

from quiesce.core.messages import Leg, Ping, TransferId

NOTHING: tuple[int, int, frozenset[int]] = (0, 0, frozenset())


class Ids:
    """The ids of one process, in order. Never used again."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.high = 0
        self.counter = 0

    @property
    def next(self) -> TransferId:
        return TransferId(self.epoch, self.high + 1)

    def mint(self) -> TransferId:
        self.high += 1
        return TransferId(self.epoch, self.high)

    def closed_set(self, listed: Iterable[int]) -> tuple[int, int, list[int]]:
        """(counter, high, open seqs), for the next PING. `listed`: of every machine that uses these ids."""
        self.counter += 1
        return self.counter, self.high, sorted(listed)


class ClosedSets:
    """What this process has heard of the processes that mint ids: who is there, who is gone, what is closed."""

    def __init__(self) -> None:
        self.lenders: set[int] = set()
        self.gone: set[int] = set()  # epochs that ended, one number for each process that ever did
        # (epoch, rank) -> (counter, high, open seqs): every other seq up to high is closed for ever
        self._heard_sets: dict[tuple[int, int], tuple[int, int, frozenset[int]]] = {}

    def _is_closed(self, leg: Leg) -> bool:
        _, high, open_seqs = self._heard_sets.get((leg.tid.epoch, leg.d_rank), NOTHING)
        return leg.tid.seq <= high and leg.tid.seq not in open_seqs

    def _take(self, ping: Ping) -> bool:
        """Speaks for that rank only; an older counter is ignored. False: it says nothing new, or is of nobody."""
        key = (ping.epoch, ping.rank)
        if ping.epoch not in self.lenders or ping.counter <= self._heard_sets.get(key, NOTHING)[0]:
            return False
        self._heard_sets[key] = (ping.counter, ping.high, frozenset(ping.open_seqs))
        return True

    def _up(self, epoch: int) -> bool:
        """False: it is gone, and its records were forgotten: "unknown" of it would prove nothing (guard A14)."""
        if epoch in self.gone:
            return False
        self.lenders.add(epoch)
        return True

    def _is_gone(self, epoch: int) -> None:
        self.lenders.discard(epoch)
        self.gone.add(epoch)
        for key in [key for key in self._heard_sets if key[0] == epoch]:
            del self._heard_sets[key]
