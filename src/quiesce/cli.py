"""The command line. It parses and hands on; whatever loads torch is imported inside the command that needs it."""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Env, Toml

from quiesce.lab import commands as lab_commands
from quiesce.ops import doctor_command, keys_command
from quiesce.options import (
    SUPERVISED,
    ClusterOptions,
    EngineOptions,
    HandOffOptions,
    HttpOptions,
    ProcessOptions,
    SizeOptions,
)
from quiesce.options_router import RouterWiring, RoutingOptions, SilenceOptions, router_settings
from quiesce.options_worker import WorkerWiring, worker_settings
from quiesce.roles.settings import Role, SettingsError, WorkerSettings

EXIT_REFUSED = 2  # what was asked for cannot be done; nothing was started
EXIT_UNREAD = 128 + signal.SIGPIPE
DEFAULT_MODEL = "smollm2"

ROLES = Group("One role each (on several machines, or under your own supervisor)", sort_key=2)

Model = Annotated[
    str,
    Parameter(
        help="`smollm2` (fetched once, 93 MB), a local Hugging Face folder, or a hub id such as org/name.",
        group=Group("Model", sort_key=0),
    ),
]

app = App(
    name="quiesce",
    version=lambda: metadata.version("quiesce"),
    help="""\
Serve language models with prefill and decode on separate engines. A KV page is given back only on proof that
nothing can still touch it.

Start with:

    quiesce serve                                   # smollm2 on 127.0.0.1:8000, 1 prefill + 1 decode
    quiesce serve smollm2 --prefill 2 --decode 1    # two prefill engines
    quiesce serve ./my-llama --context-length 4096 --max-total-tokens 32768

Every option can also come from the environment (`QUIESCE_PORT=9000`) or from a TOML file (`--config FILE`, else
`./quiesce.toml` where there is one; a table for each command: `[serve]`, `port = 9000`). The command line wins
over the environment, the environment over the file.
""",
    default_parameter=Parameter(negative_iterable=(), negative_none=()),
    help_format="markdown",
)
app["--help"].group = app["--version"].group = Group("Help", sort_key=9)


@app.command(sort_key=1)
def serve(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    cluster: ClusterOptions = ClusterOptions(),  # noqa: B008  (frozen)
    http: HttpOptions = HttpOptions(),  # noqa: B008
    sizes: SizeOptions = SizeOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    hand_off: HandOffOptions = HandOffOptions(),  # noqa: B008
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """Start and supervise a whole cluster on this machine.

    Router, prefill and decode workers run as processes of their own. It says where it listens once it can answer.
    A process that dies is started again with back-off. Ctrl-C or SIGTERM drains: running requests finish within
    `--drain-timeout` (a second one cuts that short), and nothing is left behind.

    Exit codes: 0 after a clean drain; 1 when a process cannot be started or had to be killed; 2 when what was
    asked for cannot be done.

        quiesce serve --port 9000
        quiesce serve --prefill 2 --decode 2 --threads 4
        quiesce serve --colocated        # one engine, no hand-off: the baseline
    """
    from quiesce.ops import serve as cluster_of  # noqa: PLC0415

    name = _name(model, cluster.served_model_name)
    asked = cluster_of.Serve(_resolve(model), name, cluster, http, sizes, engine, hand_off, routing, process)
    return cluster_of.serve(asked)


@app.command(group=ROLES, sort_key=1)
def router(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    wiring: RouterWiring,
    http: HttpOptions = HttpOptions(),  # noqa: B008
    silence: SilenceOptions = SilenceOptions(),  # noqa: B008
    routing: RoutingOptions = RoutingOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """The front: OpenAI-compatible HTTP, tokenisation, pairing of legs. It loads no weights."""
    from quiesce.router.app import run  # noqa: PLC0415

    name = _name(model, wiring.served_model_name)
    return run(router_settings(_resolve(model), name, wiring, http, silence, routing, process))


@app.command(group=ROLES, sort_key=2)
def prefill(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    wiring: WorkerWiring,
    sizes: SizeOptions = SizeOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    hand_off: HandOffOptions = HandOffOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """A worker that computes prompts and writes their KV pages into decode workers."""
    settings = _worker("prefill", model, wiring, sizes, engine, hand_off, process)
    from quiesce.roles.prefill import run  # noqa: PLC0415

    return _run_worker(run, settings)


@app.command(group=ROLES, sort_key=3)
def decode(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    wiring: WorkerWiring,
    sizes: SizeOptions = SizeOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    hand_off: HandOffOptions = HandOffOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """A worker that lends pages to prefill workers and generates the answers."""
    settings = _worker("decode", model, wiring, sizes, engine, hand_off, process)
    from quiesce.roles.decode import run  # noqa: PLC0415

    return _run_worker(run, settings)


@app.command(group=ROLES, sort_key=4)
def colocated(
    model: Model = DEFAULT_MODEL,
    /,
    *,
    wiring: WorkerWiring,
    sizes: SizeOptions = SizeOptions(),  # noqa: B008
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    process: ProcessOptions = ProcessOptions(),  # noqa: B008
) -> int:
    """A worker that does both, without a hand-off."""
    settings = _worker("colocated", model, wiring, sizes, engine, HandOffOptions(), process)
    from quiesce.roles.colocated import run  # noqa: PLC0415

    return _run_worker(run, settings)


app.command(doctor_command.doctor, sort_key=2)
app.command(keys_command.app)
app.command(lab_commands.verify, sort_key=4)
app.command(lab_commands.race, sort_key=5)
app.command(lab_commands.plan, sort_key=6)
app.command(lab_commands.sim, sort_key=8)
app.command(lab_commands.soak, sort_key=8)

model_app = App(name="model", help="Fetch and list models.", sort_key=3)
app.command(model_app)


@model_app.command
def pull(model: Model = DEFAULT_MODEL, /, *, verify: bool = False) -> int:
    """Fetch a model, or complete a fetch that was interrupted, and print its folder.

    Parameters
    ----------
    verify
        Check the sha256 of every file that is already here.
    """
    from quiesce.models import registry  # noqa: PLC0415

    print(registry.pull(model, verify=verify))
    return 0


@model_app.command(name="list")
def list_() -> int:
    """Known models and those in the local hub cache: name, state, size, source."""
    from quiesce.models import registry  # noqa: PLC0415

    for entry in registry.list_models():
        size = f"{entry.bytes / 1e6:.0f} MB" if entry.bytes else "-"
        print(f"{entry.name:<40} {entry.state:<8} {size:>9}  {entry.source}")
    return 0


@app.command(sort_key=7)
def conformance(
    engine: Annotated[str, Parameter(help="A transfer engine, e.g. tcp or nixl/cma; or a factory, module:function.")],
    /,
    *,
    check: Annotated[tuple[str, ...], Parameter(negative="", help="Only this check; can be given again.")] = (),
    json: Annotated[bool, Parameter(negative="", help="The results as JSON on stdout; words go to stderr.")] = False,
) -> int:
    """Put a transfer engine to the test: what it places, refuses and proves, with processes that stop and die.

    It runs on this machine between processes of its own, and takes about a minute. An engine of your own is found
    through an entry point of the group quiesce.transports. Exit code 1 when a check failed.

    Examples
    --------
    quiesce conformance tcp

    quiesce conformance nixl/tcp --check fence_is_final --json
    """
    from quiesce.transfer.conformance.run import command  # noqa: PLC0415
    from quiesce.transfer.leaving import leave  # noqa: PLC0415

    code = command(engine, list(check), as_json=json)
    leave(code)
    return code


@app.command(sort_key=9)
def version() -> int:
    """Print the version."""
    print(metadata.version("quiesce"))
    return 0


# ------------------------------------------------------------ from options to settings


def _resolve(model: str) -> Path:
    from quiesce.models import registry  # noqa: PLC0415

    return registry.resolve(model, progress=not os.environ.get(SUPERVISED))


def _name(model: str, given: str | None) -> str:
    path = Path(model).expanduser()
    return given or (path.resolve().name if path.is_dir() else model)


def _worker(
    role: Role,
    model: str,
    wiring: WorkerWiring,
    sizes: SizeOptions,
    engine: EngineOptions,
    hand_off: HandOffOptions,
    process: ProcessOptions,
) -> WorkerSettings:
    key = (wiring.registry_key or wiring.keys / "ring" / "router.pub").read_text("ascii").strip()
    name = _name(model, wiring.served_model_name)
    from quiesce.ops.preflight import check_model  # noqa: PLC0415

    folder = _resolve(model)
    check_model(folder, sizes, engine, workers=1, colocated=role == "colocated")
    return worker_settings(role, folder, name, key, wiring, sizes, engine, hand_off, process)


def _run_worker(run: Callable[[WorkerSettings], int], settings: WorkerSettings) -> int:
    from quiesce.engine.errors import EngineError  # noqa: PLC0415
    from quiesce.ops.logs import configure_logging  # noqa: PLC0415
    from quiesce.transfer.leaving import leave  # noqa: PLC0415

    configure_logging(settings.log_level, settings.log_format, settings.name)
    try:
        code = run(settings)
    except EngineError as error:
        raise SettingsError(str(error)) from error
    leave(code)
    return code


# ------------------------------------------------------------ entry


@app.meta.default
def _configured(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            env_var="QUIESCE_CONFIG", help="TOML file with settings; by default ./quiesce.toml where there is one."
        ),
    ] = None,
) -> Any:
    if os.environ.get(SUPERVISED):
        app.config = ()  # the supervisor has read them and passes everything on
    else:
        app.config = (Env("QUIESCE_", command=False), *_file(config, tokens))
    return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")


def _file(named: Path | None, words: Sequence[str]) -> list[Toml]:
    """The command's table; for `doctor`, which looks at what `serve` would be told, that of `serve` behind it."""
    path = named or Path("quiesce.toml")
    try:
        tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if named is None:
            return []
        raise SettingsError(f"There is no settings file {named}.") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from error
    files = [Toml(path)]
    if words[:1] == ("doctor",):
        files.append(Toml(path, root_keys=("serve",), use_commands_as_keys=False, allow_unknown=False))
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    from quiesce.models.errors import ModelError  # noqa: PLC0415

    app.config = ()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        result = app.meta(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except CycloptsError as error:
        return _refuse(str(error))
    except (ModelError, SettingsError, OSError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


def _refuse(reason: str) -> int:
    print(f"quiesce: {reason}", file=sys.stderr)
    return EXIT_REFUSED
