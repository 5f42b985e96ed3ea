"""The idle check: when the clients are gone, nothing is owed, held, queued or leaked, and the numbers say so."""

from __future__ import annotations

from typing import Any

EMPTY = (
    *("legs", "running", "waiting", "queue", "offers", "posts", "promised"),
    *("asking", "turns", "siblings", "retracted", "revoking"),
    *("unattached", "checks"),
)


def not_idle(state: dict[str, Any], boot: dict[str, Any] | None = None) -> list[str]:
    """Why a worker's state (as `/debug/ledger` shows it) is not idle, a line each. `boot`: the state to compare
    threads and file descriptors with."""
    pages = state["pages"]
    parts = {name: pages[name] for name in ("free", "owned", "cached", "held", "retained")}
    lines = []
    if sum(parts.values()) != pages["total"] or min(parts.values()) < 0:
        lines.append(f"pages do not add up to {pages['total']}: {parts}")
    lines += [f"{parts[name]} pages {name}" for name in ("owned", "held", "retained") if parts[name]]
    if pages["rows_free"] != pages["rows_total"]:
        lines.append(f"{pages['rows_total'] - pages['rows_free']} request rows are out")
    lines += [f"{name}: {state[name]}" for name in EMPTY if state.get(name)]
    lines += [f"{name}: {state[name]}" for name in ("transfers", "records") if state.get(name)]
    if (started := state["legs_started"]) != (ended := sum(state["legs_ended"].values())):
        lines.append(f"{started} legs started, {ended} ended: {state['legs_ended']}")
    lines += state["not_idle"]
    if state["faults"]:
        lines.append(f"{state['faults']} unexpected faults were logged")
    if boot is not None:
        lines += [
            f"{name}: {state[name]}, {boot[name]} at boot" for name in ("threads", "fds") if state[name] > boot[name]
        ]
    return lines
