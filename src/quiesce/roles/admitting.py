"""Which legs a worker lets in. A leg that is refused leaves nothing behind and is told at once (guards D1, D6)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quiesce.core.admission import check, effective_limit
from quiesce.core.messages import Start
from quiesce.engine.errors import EngineError
from quiesce.engine.sampler import check_sampling
from quiesce.roles.budgets import HoldBudget

if TYPE_CHECKING:
    from quiesce.roles.settings import WorkerSettings
    from quiesce.roles.worker import Worker


def hold_budget(settings: WorkerSettings, pages: int, rows: int) -> HoldBudget:
    """pages, rows: of the pools. Holds may use the rows that running requests cannot."""
    return HoldBudget(
        pages=int(pages * settings.max_held),
        rows=rows - settings.max_running,
        tenant_share=settings.max_held_per_tenant,
        now=time.monotonic,
    )


def refusal(worker: Worker, start: Start) -> tuple[int, str] | None:
    """Status and reason, or None."""
    name, legs = worker.settings.name, worker.legs
    if start.probe:
        return _misfit(worker, start)
    if worker.draining:
        return 503, f"{name} is draining"
    if start.rid in legs.by_rid:
        return 409, f"request {start.rid} is running already"
    if start.room in legs.by_room:
        return 409, f"room {start.room} is in use"
    if len(legs) >= worker.settings.max_queued:
        return 503, f"{name} has {len(legs)} requests, its limit"
    if (full := worker.budget.exhausted(start.tenant)) is not None:
        return 503, f"{name}: {full}"
    return _misfit(worker, start)


def _misfit(worker: Worker, start: Start) -> tuple[int, str] | None:
    """What is wrong with the request itself."""
    vocabulary = worker.engine.model_config.vocab_size
    if any(not 0 <= token < vocabulary for token in start.token_ids):
        return 400, f"token ids must be in 0..{vocabulary - 1}"
    try:
        check_sampling(start.sampling, vocabulary, worker.engine.eos_ids)
    except EngineError as error:
        return 400, str(error)
    if start.resumed and not 0 < start.resumed < min(len(start.token_ids), start.sampling.max_tokens):
        return 400, f"{start.resumed} tokens of an answer that was begun elsewhere do not fit this request"
    prompt = len(start.token_ids) - start.resumed
    own = effective_limit(worker.limits())
    refused = check(prompt, start.sampling.max_tokens, min(own, worker.registration.limit or own))
    return None if refused is None else (refused.status, refused.reason)
