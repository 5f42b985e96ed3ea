"""What a worker's transport can prove, and what follows: refused at start-up, or served with a warning."""

from __future__ import annotations

from quiesce.core.ledger import Ledger
from quiesce.roles.settings import SettingsError, WorkerSettings
from quiesce.transfer.interface import Capabilities


def unproven(caps: Capabilities) -> bool:
    """It cannot say when what was posted has ended: after a failure, pages come back by a restart only."""
    return caps.drain == "none"


def check_transport(caps: Capabilities, settings: WorkerSettings) -> None:
    """Raises SettingsError for a transport that cannot do, or must not do, what these settings ask for."""
    if not (caps.pull if settings.direction == "pull" else caps.push):
        other = "push" if settings.direction == "pull" else "pull"
        verb = "read from" if settings.direction == "pull" else "write into"
        raise SettingsError(
            f"--direction {settings.direction}: {caps.label} cannot {verb} a peer's pages. Use --direction {other}, "
            "or another --transfer."
        )
    if unproven(caps) and not settings.allow_unproven:
        raise SettingsError(
            f"--transfer {caps.label} cannot prove that what was posted has ended, so that pages of a failed "
            "hand-off may stay retained until a restart. Use another --transfer, or accept it with --allow-unproven."
        )


def cautions(caps: Capabilities | None, settings: WorkerSettings, ledger: Ledger) -> tuple[str, ...]:
    """What operators should know about a worker with these settings now, a sentence each."""
    said = []
    if caps is not None and unproven(caps):
        said.append(f"{caps.label} cannot prove that what was posted has ended (--allow-unproven)")
    if settings.on_hold_expiry == "release":
        said.append("pages are freed without proof after the hold timeout (--on-hold-expiry=release)")
    if ledger.unsound:
        said.append(f"{ledger.unsound} leases were closed without proof")
    census = ledger.census()
    if census.retained:
        said.append(f"{census.retained} of {census.total} pages are retained: no proof could be had")
    return tuple(said)


def worn_out(ledger: Ledger, share: float, used_up: str | None) -> str | None:
    """Why only a restart helps: more than `share` of the pool waits for proofs that cannot be had, or the transport
    is used up. None: it does not need one."""
    census = ledger.census()
    if census.retained > share * census.total:
        return f"more than {100 * share:.0f} % of the pool is retained without proof"
    return used_up
