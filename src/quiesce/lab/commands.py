"""The lab's commands that run real engines. Each imports what it needs when it is called: the lab loads torch."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

DEFAULT_MODEL = "smollm2"
Race = Literal["one-pair", "two-donors", "refused", "restart", "tainted", "reuse", "late-read"]


def race(
    scene: Annotated[Race, Parameter(help="Which race.")],
    model: Annotated[str, Parameter(help="A model that `quiesce serve` takes.")] = DEFAULT_MODEL,
    /,
    *,
    transfer: Annotated[str, Parameter(help="The transfer engine.")] = "shm",
    unsafe_runs: Annotated[int, Parameter(help="Runs with pages freed at once: each must show the fault.")] = 1,
    safe_runs: Annotated[int, Parameter(help="Runs with the ledger: none may.")] = 1,
    out: Annotated[Path, Parameter(help="Folder for the picture.")] = Path("race"),
    open: Annotated[bool, Parameter(negative="", help="Open the picture in the browser.")] = False,
    json: Annotated[bool, Parameter(negative="", help="The result as JSON, last.")] = False,
) -> int:
    """Reproduce the race on real engines: one request's late write in another one's pages, and how it cannot be.

    Each run cuts a request while its pages are being written and gives, or refuses, them to the next. It writes a
    picture of the page timeline. Exit code 1 when the unsafe twin did not show the fault, or the product did.

    Examples
    --------
    quiesce race two-donors --open

    quiesce race one-pair --unsafe-runs 20 --safe-runs 200
    """
    from quiesce.lab.race.play import race as play  # noqa: PLC0415
    from quiesce.models import registry  # noqa: PLC0415

    path = registry.resolve(model)
    return play(scene, path, transfer, unsafe=unsafe_runs, safe=safe_runs, out=out, open_picture=open, as_json=json)


def soak(
    url: Annotated[str | None, Parameter(help="A running server; without one, a cluster of our own.")] = None,
    /,
    *,
    model: Annotated[str, Parameter(help="For a cluster of our own.")] = DEFAULT_MODEL,
    option: Annotated[tuple[str, ...], Parameter(help="One more word for `quiesce serve`; repeat it.")] = (),
    key: Annotated[str, Parameter(help="API key of the server.")] = "",
    minutes: Annotated[float, Parameter(help="How long, at most.")] = 5.0,
    aborts: Annotated[int, Parameter(help="Stop after so many hand-offs were cut half way; 0: by time alone.")] = 0,
    requests: Annotated[int, Parameter(help="Requests of a round.")] = 200,
    concurrency: Annotated[int, Parameter(help="Requests at a time.")] = 16,
    tenants: Annotated[int, Parameter(help="Tenants, each with a secret of its own.")] = 6,
    seed: Annotated[int | None, Parameter(help="Of everything that is drawn; by default a fresh one.")] = None,
    storm: Annotated[float, Parameter(help="The share of clients that leave early, 0 to 1.")] = 0.6,
    faults: Annotated[bool, Parameter(help="Break processes and messages too (own cluster only).")] = True,
    oracle: Annotated[
        bool, Parameter(help="Answers must equal those given alone; not for engines that vary.")
    ] = True,
    out: Annotated[Path | None, Parameter(help="Write the report so far to this file after each round.")] = None,
    json: Annotated[bool, Parameter(negative="", help="The report as JSON on standard output.")] = False,
) -> int:
    """Look for one tenant's text in another's answer, for as long as it is given.

    Tenants with secret markers ask, leave early, read slowly and come in bursts; on a cluster of our own processes
    are killed and stopped, and messages are lost, repeated and delayed. Every answer that comes whole must equal the
    one given alone, no answer may hold another tenant's marker, and between rounds every page must be back. With a
    URL it tries any OpenAI-compatible server; pages are counted where it is one of ours. Exit code 1 on any finding.
    SIGTERM or Ctrl-C ends it after the round that is under way, with a report.

    Examples
    --------
    quiesce soak --minutes 60

    quiesce soak http://127.0.0.1:30000 --no-oracle
    """
    from quiesce.lab.soak.run import Asked  # noqa: PLC0415
    from quiesce.lab.soak.run import soak as run  # noqa: PLC0415

    drawn = secrets.randbits(32) if seed is None else seed
    breaks = faults and url is None
    asked = (url, model, option, key, minutes, aborts, requests, concurrency, tenants, drawn, breaks, oracle, json)
    return run(Asked(*asked, storm=storm, out=out))
