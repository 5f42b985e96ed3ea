"""The router's own options of the command line: where it listens for workers and operators, and how it routes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from quiesce.channel.tls import Certificates
from quiesce.options import HAND_OFF, WIRING, HttpOptions, ProcessOptions
from quiesce.roles.settings import Failover, Policy, RouterSettings, SettingsError

ROUTING = Group("Routing", sort_key=5)


@Parameter(name="*")
@dataclass(frozen=True)
class RoutingOptions:
    policy: Annotated[
        Policy,
        Parameter(
            group=ROUTING,
            help="Which workers a request is given: least-loaded goes by the tokens that wait at each and the "
            "requests it has; round-robin by turns.",
        ),
    ] = "least-loaded"
    retries: Annotated[
        int,
        Parameter(
            group=ROUTING,
            help="Attempts that a request may have beyond the first when a worker fails it before its first token. "
            "In the long run one request in ten may be tried again.",
        ),
    ] = 2
    failover: Annotated[
        Failover,
        Parameter(
            group=ROUTING,
            help="Which answers go on at another worker when theirs dies after the first token: exact, those that "
            "are greedy or have a seed from their client; always, sampled ones too; never, none.",
        ),
    ] = "exact"
    local_prefill_below: Annotated[
        int,
        Parameter(
            group=ROUTING, help="Prompts of fewer tokens are computed where they are decoded, without a hand-off."
        ),
    ] = 0
    breaker_failures: Annotated[
        int,
        Parameter(
            group=ROUTING,
            help="Requests in a row that a worker must fail, by its own fault, to be given none for a while; "
            "0 gives it work whatever happens.",
        ),
    ] = 5
    breaker_seconds: Annotated[
        float, Parameter(group=ROUTING, help="How long that while is. Then one request tries the worker.")
    ] = 5.0


@Parameter(name="*")
@dataclass(frozen=True)
class RouterWiring:
    registry: Annotated[
        str, Parameter(group=WIRING, help="Where workers register: tcp://address:port or ipc:///path.")
    ]
    keys: Annotated[
        Path, Parameter(group=WIRING, help="Folder with router.key and ring/, the public keys that may connect.")
    ]
    served_model_name: Annotated[
        str | None, Parameter(group=WIRING, help="Name that clients ask for. By default MODEL.")
    ] = None
    admin: Annotated[
        str | None,
        Parameter(
            group=WIRING,
            help="Where operators list, drain, add and take out workers: unix:///path, guarded by its file mode, or "
            "127.0.0.1:port with --admin-key.",
        ),
    ] = None
    admin_key: Annotated[
        Path | None, Parameter(group=WIRING, help="File with the key that requests to a TCP --admin must bear.")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class SilenceOptions:
    hold_timeout: Annotated[
        float,
        Parameter(
            group=HAND_OFF,
            help="Seconds that a worker may be silent before its requests are ended; give it as the workers have it.",
        ),
    ] = 30.0


def router_settings(
    model: Path,
    served_model_name: str,
    wiring: RouterWiring,
    http: HttpOptions,
    silence: SilenceOptions,
    routing: RoutingOptions,
    process: ProcessOptions,
) -> RouterSettings:
    """Keys that hold certificates give them to HTTP, unless others are named. Raises SettingsError."""
    cert, key, client_ca = Certificates.files((http.tls_cert, http.tls_key, http.tls_client_ca), wiring.keys)
    return RouterSettings(
        model=model,
        served_model_name=served_model_name,
        keys=wiring.keys,
        registry=wiring.registry,
        host=http.host,
        port=http.port,
        max_inflight=http.max_inflight,
        max_body=http.max_body,
        request_timeout=http.request_timeout,
        tool_call_parser=http.tool_call_parser,
        api_keys=http.api_keys,
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=client_ca,
        allow_open_http=http.allow_open_http,
        worker_ports=_worker_ports(http.http_port),
        worker_hosts=tuple(filter(None, (http.http_hosts or "").split(","))),
        admin=wiring.admin or "",
        admin_key=wiring.admin_key,
        hold_timeout=silence.hold_timeout,
        policy=routing.policy,
        retries=routing.retries,
        failover=routing.failover,
        local_prefill_below=routing.local_prefill_below,
        breaker_failures=routing.breaker_failures,
        breaker_seconds=routing.breaker_seconds,
        drain_timeout=process.drain_timeout,
        log_level=process.log_level,
        log_format=process.log_format,
    )


def _worker_ports(text: str | None) -> tuple[tuple[str, int], ...]:
    found = []
    for part in filter(None, (text or "").split(",")):
        name, _, port = part.strip().partition("=")
        if not name or not port.isdecimal():
            raise SettingsError(f"--http-port must be NAME=PORT,NAME=PORT, not {part!r}.")
        found.append((name, int(port)))
    return tuple(found)
