"""From the options of `quiesce serve` to a supervised cluster: checks, keys, command lines, and the first words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq

from quiesce.channel import AsyncLink, KeyPair, LinkEvent
from quiesce.core.messages import Exited
from quiesce.ops.console import Console
from quiesce.ops.preflight import (
    certificates,
    check_cluster,
    check_keys,
    check_model,
    check_routing,
    check_tls,
    choose_port,
)
from quiesce.ops.probe import http_probe
from quiesce.ops.run_dir import ROUTER, SUPERVISOR, RunDir
from quiesce.ops.supervisor import Plan, Supervisor, Timing
from quiesce.options import (
    SUPERVISED,
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
    arguments,
)
from quiesce.options_router import RouterWiring, RoutingOptions, SilenceOptions, router_settings
from quiesce.options_worker import WorkerWiring, worker_settings


@dataclass(frozen=True)
class Serve:
    """Everything `quiesce serve` was asked for. `model`: a local folder; `name`: what clients ask for."""

    model: Path
    name: str
    cluster: ClusterOptions
    http: HttpOptions
    sizes: SizeOptions
    engine: EngineOptions
    hand_off: HandOffOptions
    routing: RoutingOptions
    process: ProcessOptions

    @property
    def worker_names(self) -> dict[str, str]:
        """Name -> role."""
        if self.cluster.colocated:
            return {"colocated-0": "colocated"}
        names = {f"prefill-{i}": "prefill" for i in range(self.cluster.prefill)}
        return names | {f"decode-{i}": "decode" for i in range(self.cluster.decode)}


class Notices:
    """Tells the router which worker processes are dead; kept until the router is there to hear it."""

    def __init__(self, context: zmq.Context[Any], registry: str, router_key: str, keys: KeyPair) -> None:
        self._waiting: deque[Exited] = deque(maxlen=256)
        self._link = AsyncLink(context, registry, router_key, keys, self._changed)

    def __call__(self, name: str, epoch: int) -> None:
        self._waiting.append(Exited(name, epoch))
        self._flush()

    def _changed(self, event: LinkEvent) -> None:
        if event is LinkEvent.UP:
            self._flush()

    def _flush(self) -> None:
        while self._waiting and self._link.send(self._waiting[0]):
            self._waiting.popleft()

    def close(self) -> None:
        self._link.close()


def serve(asked: Serve) -> int:
    """Runs until Ctrl-C or SIGTERM; returns the exit code. Raises SettingsError or OSError before any start."""
    check_cluster(asked.cluster)
    check_routing(asked.routing, asked.hand_off)
    check_children(asked)
    check_keys(asked.http.api_keys)
    check_tls(asked.http)
    workers, colocated = len(asked.worker_names), asked.cluster.colocated
    check_model(asked.model, asked.sizes, asked.engine, workers, colocated=colocated)
    asked = replace(asked, http=replace(asked.http, port=choose_port(asked.http.host, asked.http.port)))
    signal.signal(signal.SIGTERM, _leave)  # until the supervisor takes signals over
    run_dir = RunDir()
    try:
        return asyncio.run(_serve(asked, run_dir))
    finally:
        run_dir.remove()


def check_children(asked: Serve) -> None:
    """What every child would refuse is refused here, once and before there is a child."""
    nowhere = Path(os.devnull)
    wiring = WorkerWiring("", nowhere, nowhere, "worker")
    worker_settings(
        "decode", asked.model, asked.name, "", wiring, asked.sizes, asked.engine, asked.hand_off, asked.process
    )
    router = RouterWiring("", nowhere)
    router_settings(asked.model, asked.name, router, asked.http, SilenceOptions(), asked.routing, asked.process)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


async def _serve(asked: Serve, run_dir: RunDir) -> int:
    context: zmq.Context[Any] = zmq.Context()
    tls = certificates(asked.http)
    router_key = KeyPair.load(run_dir.keys / f"{ROUTER}.key").public
    notices = Notices(context, run_dir.registry, router_key, KeyPair.load(run_dir.keys / f"{SUPERVISOR}.key"))
    plans = make_plans(asked, run_dir)
    console = Console([plan.name for plan in plans], form=asked.process.log_format)
    console.say(f"starting {', '.join(plan.name for plan in plans)} with {asked.name} from {asked.model}")
    started = time.monotonic()

    def ready() -> None:
        print(welcome(asked, time.monotonic() - started), flush=True)

    supervisor = Supervisor(
        plans,
        http_probe(asked.http.host, asked.http.port, None if tls is None else tls.client(check_name=False)),
        notices,
        ready,
        console,
        Timing(drain=asked.process.drain_timeout, start=asked.cluster.start_timeout),
        {**os.environ, SUPERVISED: "1", "PYTHONUNBUFFERED": "1"},
    )
    try:
        return await supervisor.run()
    finally:
        notices.close()
        context.destroy(linger=0)


def make_plans(asked: Serve, run_dir: RunDir) -> list[Plan]:
    this = [sys.executable, "-m", "quiesce"]

    def router(epoch: int) -> list[str]:
        wiring = RouterWiring(run_dir.registry, run_dir.keys, asked.name, run_dir.admin)
        silence = SilenceOptions(asked.hand_off.hold_timeout)
        words = arguments(wiring, asked.http, silence, asked.routing, asked.process)
        return [*this, "router", str(asked.model), *words]

    def worker(name: str, role: str) -> Callable[[int], list[str]]:
        def command(epoch: int) -> list[str]:
            wiring = WorkerWiring(
                registry=run_dir.registry,
                registry_key=run_dir.router_public_key_file,
                keys=run_dir.keys,
                run_dir=run_dir.path,
                name=name,
                served_model_name=asked.name,
                epoch=f"{epoch:016x}",
            )
            hand_off = [] if role == "colocated" else [asked.hand_off]
            words = arguments(wiring, asked.sizes, asked.engine, *hand_off, asked.process)
            return [*this, role, str(asked.model), *words]

        return command

    def fresh_keys(name: str) -> Callable[[], object]:
        return lambda: run_dir.fresh_keys(name)

    plans = [Plan(ROUTER, router, is_router=True)]
    for name, role in asked.worker_names.items():
        plans.append(Plan(name, worker(name, role), fresh_keys(name)))
    return plans


def welcome(asked: Serve, seconds: float) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(asked.http.host, asked.http.host)
    scheme = "http" if asked.http.tls_cert is None else "https"
    address = f"{scheme}://[{host}]:{asked.http.port}" if ":" in host else f"{scheme}://{host}:{asked.http.port}"
    shape = (
        "one engine, no hand-off"
        if asked.cluster.colocated
        else f"{asked.cluster.prefill} prefill + {asked.cluster.decode} decode over {asked.hand_off.transfer}"
    )
    ca, cert, key = asked.http.tls_client_ca, asked.http.tls_cert, asked.http.tls_key
    shown = f"--cacert {ca} --cert {cert} --key {key} " if ca else ""
    body = json.dumps(
        {"model": asked.name, "messages": [{"role": "user", "content": "Name three colours of the rainbow."}]}
    ).replace("'", "'\\''")
    return (
        f"\nQuiesce serves {asked.name} at {address} ({shape}), ready after {seconds:.1f} s. Try:\n\n"
        f"  curl {shown}{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        "Ctrl-C drains and ends it.\n"
    )
