"""The command line of `quiesce doctor`. What it needs is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from quiesce.options import (
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
)
from quiesce.options_router import RoutingOptions

LOOKED_AT = Group("What else is looked at", sort_key=0)


def doctor(
    model: Annotated[str, Parameter(help="A model that `quiesce serve` takes.", group=LOOKED_AT)] = "smollm2",
    /,
    *,
    keys: Annotated[Path | None, Parameter(group=LOOKED_AT, help="A folder of keys: --keys of your workers.")] = None,
    url: Annotated[str | None, Parameter(group=LOOKED_AT, help="A running cluster, http://host:port.")] = None,
    key: Annotated[str, Parameter(group=LOOKED_AT, help="API key for --url; admin = true for its ledgers.")] = "",
    bundle: Annotated[
        Path | None, Parameter(group=LOOKED_AT, help="Pack the report and that cluster's state: FILE.tar.gz.")
    ] = None,
    json: Annotated[bool, Parameter(group=LOOKED_AT, negative="", help="The report as JSON on stdout.")] = False,
    cluster: ClusterOptions = ClusterOptions(),  # noqa: B008  (frozen)
    http: HttpOptions = HttpOptions(),  # noqa: B008
    sizes: SizeOptions = SizeOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    hand_off: HandOffOptions = HandOffOptions(),  # noqa: B008
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """Check this machine, an installation and a running cluster, and say what to change.

    It takes the options of `quiesce serve` and checks that they would work: pools against context, memory, limits of
    the system, and each transfer engine with a real abort on scratch pages. It starts no engine and fetches nothing.
    Exit code 1 when a check fails; what is only worth a look does not count.

    Examples
    --------
    quiesce doctor --context-length 4096 --max-total-tokens 32768

    quiesce doctor --keys /etc/quiesce/keys --url http://127.0.0.1:8000 --json

    quiesce doctor --url http://127.0.0.1:8000 --bundle doctor.tar.gz
    """
    from quiesce.ops.doctor import Asked, run  # noqa: PLC0415

    asked = Asked(model, cluster, http, sizes, engine, hand_off, routing, process, keys, url, key)
    return run(asked, bundle=bundle, as_json=json)
