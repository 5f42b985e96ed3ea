"""What /health says: whether a request could be served now, and if not, what is missing."""

from __future__ import annotations

from typing import Any

from quiesce.router import pairing
from quiesce.router.registry import Registry, Worker


def report(registry: Registry, now: float, draining: bool, running: int) -> tuple[bool, dict[str, Any]]:
    """(a request can be served, JSON-able detail)"""
    workers = list(registry.workers.values())
    usable = pairing.usable(workers, now, registry.patience)
    missing = pairing.missing(usable)
    healthy = not missing and not draining
    detail = {
        "status": "ok" if healthy else "draining" if draining else "unavailable",
        "missing": missing,
        "mismatches": pairing.mismatches(workers),
        "context_limit": pairing.context_limit(usable),
        "requests": running,
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
        "progress": latest.progress,
        "queued": latest.queued,
        "running": latest.running,
        "legs": len(worker.legs),
        "context_length": latest.limits.context_length,
        "pool_tokens": latest.limits.pool_tokens,
        "max_queued": latest.limits.max_queued,
        "step": latest.step,
    }
