"""`quiesce doctor`: every check in order. One check is one function, and one that fails stops no other."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from quiesce.channel.tls import Certificates
from quiesce.engine.config import read_config
from quiesce.engine.errors import EngineError
from quiesce.ops import (
    doctor_cluster,
    doctor_keys,
    doctor_model,
    doctor_report,
    doctor_system,
    doctor_transfer,
)
from quiesce.ops.doctor_finding import Finding, fail, guarded, ok
from quiesce.ops.preflight import certificates, check_cluster, check_keys, check_routing, check_tls
from quiesce.ops.serve import Serve, check_children
from quiesce.options import (
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
)
from quiesce.options_router import RoutingOptions
from quiesce.roles.settings import SettingsError


@dataclass(frozen=True)
class Asked:
    """What `quiesce serve` would be told, and what to look at besides. `model`: as typed."""

    model: str
    cluster: ClusterOptions
    http: HttpOptions
    sizes: SizeOptions
    engine: EngineOptions
    hand_off: HandOffOptions
    routing: RoutingOptions
    process: ProcessOptions
    keys: Path | None = None
    url: str | None = None
    key: str = ""

    @property
    def workers(self) -> int:
        return 1 if self.cluster.colocated else self.cluster.prefill + self.cluster.decode


def run(asked: Asked, *, bundle: Path | None, as_json: bool) -> int:
    """The exit code: 1 when a check fails."""
    answers = doctor_cluster.ask(asked.url, asked.key, tls=shown(asked)) if asked.url else None
    console = Console(stderr=as_json)
    with console.status("looking"):
        findings = list(examine(asked, answers))
    if as_json:
        print(json.dumps(doctor_report.as_json(findings), indent=2))
    else:
        doctor_report.show(findings, console)
    if bundle is not None:
        doctor_report.bundle(bundle, findings, answers)
        console.print(f"Packed into {bundle}: the report and, with --url, the cluster's ledgers and metrics.")
    return doctor_report.exit_code(findings)


def shown(asked: Asked) -> ssl.SSLContext | None:
    """What --url is asked with: the certificate of --tls-cert, or of --keys. Raises SettingsError."""
    found = certificates(asked.http) or (Certificates.of(asked.keys) if asked.keys is not None else None)
    if found is None or found.ca is None:
        return None
    try:
        return found.client()
    except ValueError as error:
        raise SettingsError(f"{error}.") from error


def examine(asked: Asked, answers: doctor_cluster.Answers | None) -> Iterator[Finding]:
    yield from machine(asked)
    folder, found = doctor_model.model(asked.model)
    yield found
    yield from guarded("options", partial(options, asked, folder or Path(asked.model)))
    if folder is None:
        yield doctor_model.absent(asked.model)
    else:
        yield from guarded("pool", lambda: doctor_model.sizes(folder, asked.sizes, asked.engine, asked.workers))
    if not asked.cluster.colocated:
        yield from guarded("locked memory", lambda: doctor_system.locked_memory(pool_bytes(asked, folder)))
        yield from guarded("ptrace", lambda: doctor_system.ptrace(asked.hand_off.transfer))
        yield from guarded("transfer", lambda: doctor_transfer.transfers(asked.hand_off))
    if asked.keys is not None:
        keys = asked.keys
        yield from guarded("keys", lambda: doctor_keys.keys(keys))
    if answers is not None:
        yield from guarded("cluster", lambda: doctor_cluster.findings(answers))


def machine(asked: Asked) -> Iterator[Finding]:
    engine, cpus = asked.engine, len(os.sched_getaffinity(0))
    yield from guarded("versions", doctor_system.versions)
    yield from guarded("packages", doctor_system.packages)
    yield from guarded("native step", lambda: doctor_system.native_step(engine.native_level, engine.device))
    yield from guarded("kernel", doctor_system.kernel)
    yield from guarded("cores", lambda: doctor_system.cores(asked.workers, engine.threads, cpus))
    yield from guarded("clock", doctor_system.clock)
    yield from guarded("open files", lambda: doctor_system.open_files(asked.http.max_inflight))
    yield from guarded("shared memory", doctor_system.shared_memory)
    yield from guarded("pidfd", doctor_system.pidfd)
    yield from guarded("run folder", doctor_system.run_folder)


def options(asked: Asked, folder: Path) -> Finding:
    """What `quiesce serve` refuses before it starts anything."""
    name = asked.cluster.served_model_name or "model"
    serve = Serve(
        folder,
        name,
        asked.cluster,
        asked.http,
        asked.sizes,
        asked.engine,
        asked.hand_off,
        asked.routing,
        asked.process,
    )
    try:
        check_cluster(asked.cluster)
        check_routing(asked.routing, asked.hand_off)
        check_keys(asked.http.api_keys)
        check_tls(asked.http)
        check_children(serve)
    except SettingsError as error:
        return fail("options", str(error), "Change that option; `quiesce serve --help` has them all.")
    return ok("options", "`quiesce serve` would take them")


def pool_bytes(asked: Asked, folder: Path | None) -> int:
    """Of one worker's pool; 0 where the model is not known."""
    try:
        config = read_config(folder) if folder is not None else None
    except EngineError:
        config = None
    page = max(asked.sizes.page_size, 1)
    if config is None:
        return 0
    return asked.sizes.pool_tokens(config.context_length) // page * config.page_bytes(asked.engine.dtype, page)
