"""What one check of `quiesce doctor` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`found`: what is so. `fix`: what to change, empty where nothing is to be."""

    name: str
    status: Status
    found: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warn(name: str, found: str, fix: str) -> Finding:
    return Finding(name, "warn", found, fix)


def fail(name: str, found: str, fix: str) -> Finding:
    return Finding(name, "fail", found, fix)


def guarded(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """The check's findings; one that raises is a finding too, so that the others are still made."""
    try:
        said = check()
        return [said] if isinstance(said, Finding) else list(said)
    except Exception as error:
        return [
            fail(
                name, f"the check itself failed: {type(error).__name__}: {error}", "Report this with `--bundle FILE`."
            )
        ]
