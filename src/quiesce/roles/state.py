"""What a worker tells of itself to /debug/ledger and to the idle check: JSON-able, a snapshot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quiesce.roles.worker import Worker


def state_of(worker: Worker) -> dict[str, Any]:
    census = worker.ledger.census()
    return {
        **identity(worker),
        "pid": os.getpid(),
        "pages": {field: getattr(census, field) for field in census.__slots__},
        "not_idle": worker.ledger.not_idle(),
        "legs": len(worker.legs),
        "running": len(worker.batch),
        "timers": len(worker.timers),
        "threads": len(os.listdir("/proc/self/task")),
        "fds": len(os.listdir("/proc/self/fd")),
        "steps": worker.thread.steps,
        "prompt_tokens_computed": worker.steps.prompt_tokens_computed,
        "faults": worker.fault_count,
        "legs_started": worker.legs.started,
        "legs_ended": dict(worker.legs.ended),
        "closed_by": dict(worker.ledger.closed_by),
        "leases_opened": worker.ledger.opened,
        "step_leases": worker.ledger.steps,
        "unsound": worker.ledger.unsound,
        "agreed_limit": worker.registration.limit,
        "held_by_tenant": worker.budget.by_tenant(),
        **worker.tables(),
    }


def identity(worker: Worker) -> dict[str, Any]:
    return {"role": worker.role, "name": worker.settings.name, "epoch": f"{worker.epoch:016x}"}
