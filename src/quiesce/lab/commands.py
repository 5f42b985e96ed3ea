"""The lab's commands. Each imports what it needs when it is called: the lab loads torch."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from quiesce.lab.plan import options as plan_options
from quiesce.roles.settings import SettingsError

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


def verify(
    *,
    world: Annotated[str | None, Parameter(help="One world (with --mutants: one mutant) by its name.")] = None,
    mutants: Annotated[bool, Parameter(negative="", help="Remove one guard at a time; each must be caught.")] = False,
    deep: Annotated[
        bool, Parameter(negative="", help="The bigger worlds too, for as long as --seconds allows.")
    ] = False,
    seconds: Annotated[
        float | None, Parameter(help="Stop after so many seconds; the report says what is cut.")
    ] = None,
) -> int:
    """Search every interleaving of the hand-off in small worlds, on the classes that serve.

    Exit code 1 when a rule is broken or a mutant survives.

    Examples
    --------
    quiesce verify

    quiesce verify --mutants

    quiesce verify --deep --seconds 3600
    """
    from quiesce.lab.verify import run  # noqa: PLC0415

    return run(deep=deep, mutants=mutants, world=world, seconds=seconds)


def plan(
    *,
    workload: plan_options.Workload = plan_options.Workload(),  # noqa: B008  (frozen)
    cluster: plan_options.Cluster = plan_options.Cluster(),  # noqa: B008
    holds: plan_options.Holds = plan_options.Holds(),  # noqa: B008
    output: plan_options.Output = plan_options.Output(),  # noqa: B008
) -> int:
    """Size a cluster: what holding pages until proof costs it, in calm and in an abort storm.

    Counts pages request by request: held pages over time, the wait for admission that holds add, how many workers
    of each role the workload needs, and what a storm of aborts does with answers coming and not coming. It checks
    itself against `abort rate x hold time x pages per request`.

    Examples
    --------
    quiesce plan --rate 20 --prompt lognormal:6909,1.1 --answer exponential:350

    quiesce plan --trace conversation_trace.jsonl --rate 100 --plot held.svg

    quiesce plan --rate 50 --requests 100000 --prefill 1000 --decode 1000 --hold-timeout 10
    """
    from quiesce.lab.plan.command import run  # noqa: PLC0415

    return run(workload, cluster, holds, output)


def sim(
    *,
    seed: Annotated[int | None, Parameter(help="The first seed; without it seeds are drawn at random.")] = None,
    minutes: Annotated[float | None, Parameter(help="How long to go on (one minute where nothing is said).")] = None,
    seeds: Annotated[int | None, Parameter(help="How many seeds.")] = None,
    requests: Annotated[int, Parameter(help="Requests of each seed.")] = 200,
    mutant: Annotated[
        str | None, Parameter(help="Remove one guard, by the name of its mutant, and look for the damage; or `all`.")
    ] = None,
    damage: Annotated[
        bool, Parameter(negative="", help="Report a rule only when bytes are where they must not be, not before.")
    ] = False,
) -> int:
    """Simulate whole clusters on a virtual clock: the code that serves, between modelled networks and engines.

    A seed decides everything: pools, faults, requests. One that breaks a rule is made smaller, told as a story, and
    can be run again with `--seed`. Exit code 1 when a rule is broken or a mutant survives.

    Examples
    --------
    quiesce sim --minutes 5

    quiesce sim --seed 42

    quiesce sim --mutant H11 --damage
    """
    from quiesce.lab.sim.command import SimError, run  # noqa: PLC0415

    try:
        return run(seed=seed, minutes=minutes, seeds=seeds, requests=requests, mutant=mutant, damage=damage)
    except SimError as error:
        raise SettingsError(str(error)) from error
