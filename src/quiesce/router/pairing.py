"""Which workers serve a request: a prefill and a decode that understand each other's pages, or one colocated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from quiesce.core.codec import Codec
from quiesce.core.fingerprint import Fingerprint
from quiesce.roles.settings import Policy
from quiesce.router.registry import Patience, Worker

# A prompt travels in one message; the longest token id takes 5 bytes, and 64 KiB are left for everything else.
MESSAGE_TOKENS = (Codec.MAX_BYTES - (64 << 10)) // 5


@dataclass(frozen=True)
class Pair:
    decode: Worker  # the side that answers; a colocated worker when there is no prefill
    prefill: Worker | None  # None also when a decode worker computes the prompt itself

    @property
    def workers(self) -> list[Worker]:
        return [self.decode] if self.prefill is None else [self.decode, self.prefill]


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


@dataclass(frozen=True)
class Wish:
    """What one choice should heed. `turn` grows with each choice. `beside`: the prefill worker that has the same
    prompt already, and computes it only once; it is chosen while it has room. `local`: decode may compute the
    prompt."""

    turn: int
    beside: Worker | None = None
    local: bool = False
    policy: Policy = "least-loaded"

    def rank(self, worker: Worker) -> tuple[int, int]:
        return worker.load if self.policy == "least-loaded" else 0, worker.chosen


def choose(workers: Iterable[Worker], wish: Wish) -> Pair | None:
    """The pair that suits best among usable workers; ties go round. None when there is none with room."""
    best: tuple[tuple[bool, int, int], Pair] | None = None
    for group in groups(worker for worker in workers if not worker.full).values():
        for pair in _candidates(group, wish):
            ranks = [wish.rank(worker) for worker in pair.workers] * (1 if pair.prefill else 2)
            rank = (
                wish.beside is not None and pair.prefill is not wish.beside,
                sum(load for load, _ in ranks),
                pair.decode.chosen,
            )
            if best is None or rank < best[0]:
                best = (rank, pair)
    if best is None:
        return None
    for worker in best[1].workers:
        worker.chosen = wish.turn
    return best[1]


def _candidates(group: Group, wish: Wish) -> list[Pair]:
    found = []
    if group.prefill and group.decode:
        local = [worker for worker in group.decode if worker.latest.local_prefill] if wish.local else []
        if local:
            return [Pair(min(local, key=wish.rank), None)]
        prefill = next((worker for worker in group.prefill if worker is wish.beside), None)
        found.append(Pair(min(group.decode, key=wish.rank), prefill or min(group.prefill, key=wish.rank)))
    if group.colocated:
        found.append(Pair(min(group.colocated, key=wish.rank), None))
    return found


def context_limit(workers: Iterable[Worker]) -> int | None:
    """Tokens of prompt + answer that every pair of these workers can take (guard D3); None without a pair."""
    limits = [
        min(worker.latest.limits.context_length, worker.latest.limits.pool_tokens)
        for group in groups(workers).values()
        for worker in [*(group.prefill + group.decode if all(group.sides()) else []), *group.colocated]
    ]
    return min(*limits, MESSAGE_TOKENS) if limits else None


def agreed_limit(workers: Iterable[Worker]) -> int | None:
    """The limit that is in force. It falls at once; it rises when every worker has said that it goes by the higher
    one, so that no leg is refused for a limit that clients were not shown."""
    found = list(workers)
    limit = context_limit(found)
    if limit is None:
        return None
    return min([limit, *(worker.latest.agreed for worker in found if worker.latest.agreed)])


def missing(workers: Iterable[Worker], registered: Iterable[Worker] = ()) -> list[str]:
    """What keeps these workers from forming a pair, for people; empty when there is a pair. `registered`: those that
    cannot be used now as well, which tell what kind of workers this server has."""
    found = list(workers)
    if context_limit(found) is not None:
        return []
    if {worker.role for worker in registered} == {"colocated"}:
        return ["no colocated worker is usable"]
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
