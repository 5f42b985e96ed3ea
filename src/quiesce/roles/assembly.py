"""From settings to an engine, a transport and a worker: the one place that knows every kind of them."""

from __future__ import annotations

import logging

from quiesce.core.admission import refuse_pool
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.pull_lending import PullPrefillWorker
from quiesce.roles.pull_reading import PullDecodeWorker
from quiesce.roles.settings import WorkerSettings
from quiesce.transfer.interface import Transport
from quiesce.transfer.shm import ShmTransport

log = logging.getLogger("quiesce.worker")


def make_engine(settings: WorkerSettings) -> Engine:
    """Raises EngineError for a model or sizes that cannot be served (guard D3 at start-up)."""
    engine = Engine(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        page_size=settings.page_size,
        pool_pages=settings.max_total_tokens // settings.page_size,
        deterministic=settings.deterministic,
        threads=settings.threads,
        context_length=settings.context_length,
        quantization=settings.quantization,
        native_level=settings.native_level,
    )
    asked = settings.native_level != "auto" or settings.device != "cpu"
    log.log(logging.INFO if engine.native or asked else logging.WARNING, "engine step: %s", engine.how)
    pool_tokens = engine.kv.arena.count * settings.page_size
    refusal = refuse_pool(engine.context_length, pool_tokens, settings.role)
    if refusal is not None:
        raise EngineError(refusal)
    # What the first step would spend on set-up is spent before the worker says that it serves.
    engine.warm_up(min(settings.chunked_prefill_size, engine.context_length))
    return engine


def make_transport(settings: WorkerSettings) -> Transport:
    if settings.transfer != "shm":
        raise EngineError(f"--transfer {settings.transfer}: this version moves pages by shm only")
    return ShmTransport(
        settings.run_dir, settings.epoch, stall_seconds=settings.hold_timeout, direction=settings.direction
    )


def make_worker(settings: WorkerSettings, engine: Engine, transport: Transport) -> PrefillWorker | DecodeWorker:
    """The half of the hand-off that the role has in this direction."""
    kinds: dict[tuple[str, str], type[PrefillWorker] | type[DecodeWorker]] = {
        ("prefill", "push"): PrefillWorker,
        ("decode", "push"): DecodeWorker,
        ("prefill", "pull"): PullPrefillWorker,
        ("decode", "pull"): PullDecodeWorker,
    }
    return kinds[settings.role, settings.direction](settings, engine, transport)
