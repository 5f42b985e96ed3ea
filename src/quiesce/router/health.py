"""What /health says: whether a request could be served now, and if not, what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quiesce.router import pairing
from quiesce.router.registry import Registry, Worker


@dataclass(frozen=True)
class Standing:
    """The requests that run: how many, since when the oldest does, when anything was last heard of any."""

    running: int = 0
    oldest: float | None = None
    moved: float = 0.0

    def still(self, registry: Registry, now: float) -> float:
        """Seconds for which there has been work and nothing has moved, at the router or at any worker."""
        if self.oldest is None:
            return 0.0
        steps = max((worker.stepped for worker in registry.workers.values()), default=0.0)
        return now - max(self.oldest, self.moved, steps)


def report(registry: Registry, now: float, draining: bool, work: Standing) -> tuple[bool, dict[str, Any]]:
    """(a request can be served, JSON-able detail)"""
    workers = list(registry.workers.values())
    usable = pairing.usable(workers, now, registry.patience)
    missing = pairing.missing(usable, workers)
    still = work.still(registry, now)
    stuck = still > registry.patience.stalled
    healthy = not missing and not draining and not stuck
    detail = {
        "status": "ok" if healthy else "draining" if draining else "unavailable" if missing else "stuck",
        "nothing_moved_for": round(still, 3) if stuck else None,
        "missing": missing,
        "mismatches": pairing.mismatches(workers),
        "context_limit": None if missing else pairing.agreed_limit(workers),
        "requests": work.running,
        "roles": {role: _role(role, workers, usable) for role in ("prefill", "decode", "colocated")},
        "workers": [_worker(worker, now, registry) for worker in sorted(workers, key=lambda w: w.name)],
        "departed": [
            {"name": left["name"], "epoch": left["epoch"], "reason": left["reason"], "seconds_ago": now - left["at"]}
            for left in registry.departed
        ],
    }
    return healthy, detail


def _role(role: str, workers: list[Worker], usable: list[Worker]) -> dict[str, int]:
    return {
        "registered": sum(worker.role == role for worker in workers),
        "usable": sum(worker.role == role for worker in usable),
    }


def _worker(worker: Worker, now: float, registry: Registry) -> dict[str, Any]:
    latest = worker.latest
    return {
        "name": worker.name,
        "role": worker.role,
        "epoch": f"{worker.epoch:016x}",
        "trouble": worker.trouble(now, registry.patience),
        "full": worker.full,
        "cautions": list(latest.cautions),
        "heartbeat_seconds_ago": round(now - worker.seen, 3),
        "drained": bool(worker.drained),
        "progress": latest.progress,
        "queued": latest.queued,
        "running": latest.running,
        "waiting_tokens": latest.waiting_tokens,
        "legs": len(worker.legs),
        "context_length": latest.limits.context_length,
        "pool_tokens": latest.limits.pool_tokens,
        "agreed_limit": latest.agreed,
        "max_queued": latest.limits.max_queued,
        "step": latest.step,
        "transfers": list(latest.transfers),
    }
