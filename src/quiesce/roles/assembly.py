"""From settings to an engine, a transport and a worker: the one place that knows every kind of them."""

from __future__ import annotations

import logging

from quiesce.channel.tls import Certificates
from quiesce.core.admission import refuse_pool
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.kv import Staging
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.proving import unproven
from quiesce.roles.pull_lending import PullPrefillWorker
from quiesce.roles.pull_reading import PullDecodeWorker
from quiesce.roles.settings import WorkerSettings
from quiesce.transfer import registry
from quiesce.transfer.choice import Choice
from quiesce.transfer.interface import Transport
from quiesce.transfer.tcp_tls import Tls

log = logging.getLogger("quiesce.worker")

STAGING: dict[str, Staging] = {"prefill": "source", "decode": "target", "colocated": "none"}


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
        attention=settings.attention_backend,
        cuda_graphs=settings.cuda_graphs,
        staging=STAGING[settings.role],
    )
    asked = settings.native_level != "auto" or settings.device != "cpu"
    log.log(logging.INFO if engine.native or asked else logging.WARNING, "engine step: %s", engine.how)
    pool_tokens = engine.kv.pages * settings.page_size
    refusal = refuse_pool(engine.context_length, pool_tokens, settings.role)
    if refusal is not None:
        raise EngineError(refusal)
    # What the first step would spend on set-up is spent before the worker says that it serves.
    engine.warm_up(min(settings.chunked_prefill_size, engine.context_length))
    return engine


def make_transport(settings: WorkerSettings) -> Transport:
    """What `--transfer` asks for, tried on scratch memory first. Raises EngineError, in one line."""
    tls = _tls(settings)
    setup = registry.Setup(
        run_dir=settings.run_dir,
        epoch=settings.epoch,
        host=settings.transfer_bind or None,
        max_transfer_pages=settings.max_transfer_pages,
        patience=settings.hold_timeout,
        direction=settings.direction,
        tls=tls,
    )
    if settings.transfer != registry.AUTO:
        try:
            return Choice([_tried(settings.transfer, setup)], settings.epoch)
        except (registry.MissingEngine, ValueError, OSError) as error:
            raise EngineError(f"--transfer {settings.transfer}: {error}") from error
    engines = []
    for label in registry.candidates():
        if settings.leaves_host_open(label):
            log.warning("--transfer auto goes without %s: it encrypts nothing; --allow-open-transfer has it", label)
            continue
        try:
            engine = _tried(label, setup)
            if unproven(engine.caps) and not settings.allow_unproven:
                engine.close_all()
                raise ValueError("it cannot prove that what was posted has ended; --allow-unproven accepts that")
            engines.append(engine)
        except (registry.MissingEngine, ValueError, OSError) as error:
            log.warning("--transfer auto goes without %s: %s", label, error)
    if not engines:
        raise EngineError("--transfer auto: no transfer engine works on this machine, see the warnings above")
    return Choice(engines, settings.epoch)


def _tls(settings: WorkerSettings) -> Tls | None:
    cert, key, ca = settings.transfer_tls_cert, settings.transfer_tls_key, settings.transfer_tls_ca
    if cert is None or key is None or ca is None:
        return None
    try:
        Certificates(cert, key, ca).try_out()
    except ValueError as error:
        raise EngineError(str(error)) from error
    return Tls(cert, key, ca)


def _tried(label: str, setup: registry.Setup) -> Transport:
    engine = registry.make(label, setup)
    if wrong := engine.self_test():
        engine.close_all()
        raise ValueError(f"its self-test failed: {'; '.join(wrong)}")
    return engine


def make_worker(settings: WorkerSettings, engine: Engine, transport: Transport) -> PrefillWorker | DecodeWorker:
    """The half of the hand-off that the role has in this direction."""
    kinds: dict[tuple[str, str], type[PrefillWorker] | type[DecodeWorker]] = {
        ("prefill", "push"): PrefillWorker,
        ("decode", "push"): DecodeWorker,
        ("prefill", "pull"): PullPrefillWorker,
        ("decode", "pull"): PullDecodeWorker,
    }
    return kinds[settings.role, settings.direction](settings, engine, transport)
