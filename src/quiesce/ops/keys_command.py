"""`quiesce keys`: makes and shows the keys of several hosts. What it needs is imported when it is called."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from quiesce.roles.settings import SettingsError

app = App(
    name="keys",
    help="""\
Make the keys of several hosts: control keys of every process, and certificates for HTTP and the tcp transport.

    quiesce keys init ca
    quiesce keys host ca alpha --address 10.0.0.1 --process router --process prefill-0
    quiesce keys host ca beta --address 10.0.0.2 --process decode-0

Then copy `ca/hosts/alpha` to alpha and `ca/hosts/beta` to beta, and give each process its folder with `--keys`.
The folder `ca` itself stays where it is: whoever has it can join the cluster. docs/security.md says how keys are
replaced.
""",
    sort_key=3,
)


@contextlib.contextmanager
def _refusing(kind: type[ValueError]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise SettingsError(f"{error}.") from error


@app.command
def init(
    folder: Annotated[Path, Parameter(help="Where the authority is to be: a folder that is new or empty.")],
    /,
    *,
    days: Annotated[int, Parameter(help="How long its certificates can be in force, 3650 at most.")] = 1825,
) -> int:
    """Make an authority: whom it signs for, the hosts of this cluster trust."""
    from quiesce.ops import authority  # noqa: PLC0415

    with _refusing(authority.KeysError):
        made = authority.init(folder, days)
    print(f"Made an authority in {folder}, in force until {made.not_valid_after_utc:%Y-%m-%d}.")
    print(f"Next, for each host: quiesce keys host {folder} NAME --address ADDRESS --process PROCESS")
    return 0


@app.command
def host(
    folder: Annotated[Path, Parameter(help="The authority's folder.")],
    name: Annotated[str, Parameter(help="Of the host.")],
    /,
    *,
    address: Annotated[
        tuple[str, ...], Parameter(negative="", help="Name or number at which others reach it; can be given again.")
    ] = (),
    process: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="What runs there: router, or a worker's --name; can be given again."),
    ] = (),
    out: Annotated[
        Path | None, Parameter(help="Where its keys are to be, new or empty. By default FOLDER/hosts/NAME.")
    ] = None,
    days: Annotated[int, Parameter(help="How long its certificate is in force, 825 at most.")] = 397,
    renew: Annotated[
        bool, Parameter(negative="", help="Replace keys that its processes have; they restart with the new ones.")
    ] = False,
) -> int:
    """Make one host's keys: a folder to copy there, for `--keys` of what runs there."""
    from quiesce.ops import authority  # noqa: PLC0415

    with _refusing(authority.KeysError):
        made = authority.add_host(folder, name, address, process, out=out, days=days, renew=renew)
    print(f"Made {made}: copy it to {name}, and give `--keys` its path there.")
    print(f"The hosts made before it need the ring that it is on: those in {folder / 'hosts'} have it, others are to")
    print(f"get {folder / 'ring'}. A ring is read at every handshake, so that nothing has to be restarted.")
    return 0


@app.command
def show(
    folder: Annotated[Path, Parameter(help="An authority's folder, or a host's.")],
    /,
) -> int:
    """Show what is in a folder of keys: certificates, until when they are in force, and who may connect.

    Exit code 1 when a certificate is not in force now.
    """
    from quiesce.channel import KeyRing  # noqa: PLC0415
    from quiesce.ops import authority  # noqa: PLC0415

    with _refusing(authority.KeysError):
        found = authority.certificates(folder)
    names = KeyRing(folder / "ring").names().values() if (folder / "ring").is_dir() else []
    if not found and not names:
        raise SettingsError(f"{folder} has no keys of `quiesce keys`.")
    now = datetime.datetime.now(datetime.UTC)
    ended = 0
    for word, certificate in found:
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        in_force = begins <= now < ends
        ended += not in_force and word != "issued"  # others have taken the place of those
        left = f"{(ends - now).days} days left" if in_force else "NOT IN FORCE"
        what = ", ".join(authority.addresses_of(certificate)) or certificate.subject.rfc4514_string()
        print(f"{word:<10} {what:<40} until {ends:%Y-%m-%d} ({left})")
    print(f"may connect: {', '.join(sorted(names)) or 'nobody'}")
    mine = sorted(path.stem for path in folder.glob("*.key") if path.name != authority.CA_KEY)
    if mine:
        print(f"run here: {', '.join(mine)}")
    return 1 if ended else 0
