"""Which workers serve a request: a prefill and a decode that understand each other's pages, or one colocated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from quiesce.core.messages import Fingerprint
from quiesce.router.registry import Patience, Worker


@dataclass(frozen=True)
class Pair:
    decode: Worker  # the side that answers; a colocated worker when there is no prefill
    prefill: Worker | None


@dataclass
class Group:
    """Workers with one fingerprint: their pages mean the same."""

    prefill: list[Worker]
    decode: list[Worker]
    colocated: list[Worker]

    def sides(self) -> tuple[list[Worker], list[Worker]]:
        return self.prefill, self.decode


def groups(workers: Iterable[Worker]) -> dict[Fingerprint, Group]:
    found: dict[Fingerprint, Group] = defaultdict(lambda: Group([], [], []))
    for worker in workers:
        group = found[worker.latest.fingerprint]
        {"prefill": group.prefill, "decode": group.decode, "colocated": group.colocated}[worker.role].append(worker)
    return found


def usable(workers: Iterable[Worker], now: float, patience: Patience) -> list[Worker]:
    return [worker for worker in workers if worker.trouble(now, patience) is None]


def choose(workers: Iterable[Worker], turn: int, beside: Worker | None = None) -> Pair | None:
    """The pair with the fewest outstanding legs among usable workers; ties go round. None when there is none
    with room.

    `turn` is a number that grows with each choice. `beside`: the prefill worker that has the same prompt already,
    and computes it only once; it is chosen while it has room.
    """
    best: tuple[tuple[bool, int, int], Pair] | None = None
    for group in groups(worker for worker in workers if not worker.full).values():
        for pair in _candidates(group, beside):
            load = len(pair.decode.legs) + (len(pair.prefill.legs) if pair.prefill else len(pair.decode.legs))
            rank = (pair.prefill is not beside, load, pair.decode.chosen)
            if best is None or rank < best[0]:
                best = (rank, pair)
    if best is None:
        return None
    pair = best[1]
    for worker in (pair.decode, pair.prefill):
        if worker is not None:
            worker.chosen = turn
    return pair


def _candidates(group: Group, beside: Worker | None) -> list[Pair]:
    found = []
    if group.prefill and group.decode:
        prefill = next((worker for worker in group.prefill if worker is beside), None)
        found.append(Pair(min(group.decode, key=_load), prefill or min(group.prefill, key=_load)))
    if group.colocated:
        found.append(Pair(min(group.colocated, key=_load), None))
    return found


def _load(worker: Worker) -> tuple[int, int]:
    return len(worker.legs), worker.chosen


def context_limit(workers: Iterable[Worker]) -> int | None:
    """Tokens of prompt + answer that every pair of these workers can take (guard D3); None without a pair."""
    limits = [
        min(worker.latest.limits.context_length, worker.latest.limits.pool_tokens)
        for group in groups(workers).values()
        for worker in [*(group.prefill + group.decode if all(group.sides()) else []), *group.colocated]
    ]
    return min(limits) if limits else None


def missing(workers: Iterable[Worker]) -> list[str]:
    """What keeps these workers from forming a pair, for people; empty when there is a pair."""
    found = list(workers)
    if context_limit(found) is not None:
        return []
    prefill = [worker for worker in found if worker.role == "prefill"]
    decode = [worker for worker in found if worker.role == "decode"]
    if not prefill or not decode:
        return [
            f"no {role} worker is usable" for role, have in (("prefill", prefill), ("decode", decode)) if not have
        ]
    return mismatches(found)


def mismatches(workers: Iterable[Worker]) -> list[str]:
    """Prefill and decode workers that are not paired, with the field that differs; one line for each two kinds."""
    found = list(workers)
    lines = []
    seen: set[tuple[Fingerprint, Fingerprint]] = set()
    for p in (worker for worker in found if worker.role == "prefill"):
        for d in (worker for worker in found if worker.role == "decode"):
            kinds = (p.latest.fingerprint, d.latest.fingerprint)
            difference = kinds[0].difference(kinds[1])
            if difference is not None and kinds not in seen:
                seen.add(kinds)
                lines.append(f"{p.name} and {d.name} are not paired: {difference}")
    return lines
