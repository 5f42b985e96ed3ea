"""What a worker tells the router of itself, with every heartbeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiesce.core.messages import Address, Register
from quiesce.roles.proving import cautions

if TYPE_CHECKING:
    from quiesce.roles.worker import Worker


def standing(worker: Worker) -> Register:
    settings, batch = worker.settings, worker.batch
    return Register(
        role=worker.role,
        address=Address(settings.name, worker.epoch, worker.listener.endpoint, worker.keys.public),
        fingerprint=worker.fingerprint(),
        limits=worker.limits(),
        progress=worker.thread.steps - worker.steps.probing,
        queued=len(worker.legs) - len(batch),
        running=len(batch),
        waiting_tokens=_waiting_tokens(worker),
        draining=worker.draining,
        local_prefill=worker.role == "decode" and not settings.strict_disaggregation,
        step=worker.engine.how,
        agreed=worker.registration.limit,
        cautions=cautions(worker.caps, settings, worker.ledger),
        transfers=worker.picks(),
    )


def _waiting_tokens(worker: Worker) -> int:
    """Tokens of prompts that are still to be computed, or to arrive."""
    queued = sum(len(leg.start.token_ids) for leg in worker.legs.by_rid.values() if leg.left_queue is None)
    return queued + sum(s.todo for s in worker.batch.standing.values() if s.prefilling)
