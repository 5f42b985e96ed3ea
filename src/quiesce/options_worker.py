"""A worker's own options of the command line, and its settings, made of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from quiesce.channel.tls import Certificates
from quiesce.engine.context import own_context
from quiesce.options import WIRING, EngineOptions, HandOffOptions, ProcessOptions, SizeOptions
from quiesce.roles.settings import Role, SettingsError, WorkerSettings, new_epoch


@Parameter(name="*")
@dataclass(frozen=True)
class WorkerWiring:
    registry: Annotated[
        str, Parameter(group=WIRING, help="Where the router takes registrations: tcp://host:port or ipc:///path.")
    ]
    keys: Annotated[
        Path, Parameter(group=WIRING, help="Folder with NAME.key and ring/, the public keys that may connect.")
    ]
    run_dir: Annotated[Path, Parameter(group=WIRING, help="Private folder for this worker's sockets.")]
    name: Annotated[str, Parameter(group=WIRING, help="Unique in the cluster.")]
    registry_key: Annotated[
        Path | None,
        Parameter(group=WIRING, help="File with the router's public key. By default ring/router.pub in --keys."),
    ] = None
    served_model_name: Annotated[str | None, Parameter(group=WIRING, help="As the router's.")] = None
    bind: Annotated[
        str, Parameter(group=WIRING, help="Control socket, e.g. tcp://10.0.0.5:*. By default a file in --run-dir.")
    ] = ""
    epoch: Annotated[
        str | None, Parameter(group=WIRING, help="64 bits in hex, new for every process. By default drawn.")
    ] = None


def worker_settings(
    role: Role,
    model: Path,
    served_model_name: str,
    registry_public_key: str,
    wiring: WorkerWiring,
    sizes: SizeOptions,
    engine: EngineOptions,
    hand_off: HandOffOptions,
    process: ProcessOptions,
) -> WorkerSettings:
    """Keys that hold certificates give them to tcp, unless others are named. Raises SettingsError."""
    tls = (hand_off.transfer_tls_cert, hand_off.transfer_tls_key, hand_off.transfer_tls_ca)
    cert, key, ca = tls if role == "colocated" else Certificates.files(tls, wiring.keys)
    return WorkerSettings(
        role=role,
        name=wiring.name,
        model=model,
        served_model_name=served_model_name,
        registry=wiring.registry,
        registry_public_key=registry_public_key,
        keys=wiring.keys,
        run_dir=wiring.run_dir,
        bind=wiring.bind,
        epoch=_epoch(wiring.epoch),
        device=engine.device,
        dtype=engine.dtype,
        deterministic=engine.deterministic,
        threads=engine.threads,
        quantization=engine.quantization,
        native_level=engine.native_level,
        attention_backend=engine.attention_backend,
        cuda_graphs=engine.cuda_graphs,
        context_length=sizes.context_length,
        page_size=sizes.page_size,
        max_total_tokens=sizes.pool_tokens(own_context(model)),
        chunked_prefill_size=sizes.chunked_prefill_size,
        max_running=sizes.max_running_requests,
        max_queued=sizes.max_queued_requests,
        schedule_conservativeness=sizes.schedule_conservativeness,
        transfer=hand_off.transfer,
        direction=hand_off.direction,
        allow_unproven=hand_off.allow_unproven,
        transfer_bind=hand_off.transfer_bind,
        transfer_tls_cert=cert,
        transfer_tls_key=key,
        transfer_tls_ca=ca,
        allow_open_transfer=hand_off.allow_open_transfer,
        max_transfer_pages=hand_off.max_transfer_pages,
        hold_timeout=hand_off.hold_timeout,
        max_held=hand_off.max_held,
        max_held_per_tenant=hand_off.max_held_per_tenant,
        max_retained=hand_off.max_retained,
        on_hold_expiry=hand_off.on_hold_expiry,
        reserve=hand_off.reserve,
        strict_disaggregation=hand_off.strict_disaggregation,
        drain_timeout=process.drain_timeout,
        log_level=process.log_level,
        log_format=process.log_format,
    )


def _epoch(text: str | None) -> int:
    if text is None:
        return new_epoch()
    try:
        return int(text, 16)
    except ValueError:
        raise SettingsError(f"--epoch must be 64 bits in hex, not {text!r}.") from None
