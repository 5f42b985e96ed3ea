"""A canonical value for an object graph: equal states freeze to equal, hashable values.

What is only counted or only said to people is no state (`NOT_STATE`): reasons, repeats, statistics. `PACING` is
what only decides how often something is said again: no state either where a sent message stays deliverable.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from quiesce.core.messages import Abort, Accept, Busy, Failed, Ping
from quiesce.core.ranks import Entry, Finish, Hold, Report

NOT_STATE = frozenset(
    {"cause", "repeats", "stale", "ended", "closed_by", "opened", "unsound", "faults", "taints"}
) | {
    "fingerprint",
    "steps",
    "_posts",
    "_on_release",
    "_return_pages",
    "_return_rows",
    "extents",  # of a holding, and what is out: the same pages once more
    "_out",
    "_by_lender",  # what is in another table, by another key
    "_by_peer",
    "_quarantined",
    "ahead",
}
COUNTED = frozenset({"busy", "deferrals", "retained", "_pages_in"})  # matters for costly fences and for reports
PACING = frozenset({"accepted", "acked", "timers", "renewed", "log", "_applied"})
PLAIN = (int, str, bytes, float, type(None), Enum)
AS_IT_IS: set[type] = {bool, int, str, bytes, float, type(None)}  # and what `_freezer` finds to be a value; the most
Freezer = Callable[[Any, frozenset[str]], Any]


def _without_cause(message: Any) -> Any:
    return msgspec.structs.replace(message, cause="")


def _without_reason(message: Any) -> Any:
    return msgspec.structs.replace(message, reason="")


def _entry(entry: Entry) -> Entry:
    if isinstance(entry.what, Hold | Finish):
        return msgspec.structs.replace(entry, what=type(entry.what)(entry.what.tid, ""))
    return entry


# Messages without what is only for people or for pacing, and hashable; all others are what they are.
MESSAGES: dict[type, Callable[[Any], Any]] = {
    Report: _without_cause,
    Entry: _entry,
    Abort: _without_reason,
    Failed: _without_reason,
    Busy: lambda message: msgspec.structs.replace(message, posts=0),
    Accept: lambda message: msgspec.structs.replace(message, place=0),
    Ping: lambda message: msgspec.structs.replace(message, open_seqs=tuple(message.open_seqs)),
}


def plain(message: Any) -> Any:
    """A message as it counts in a state."""
    as_it_counts = MESSAGES.get(message.__class__)
    return message if as_it_counts is None else as_it_counts(message)


def freeze(thing: Any, without: frozenset[str] = NOT_STATE) -> Any:
    """Dicts and sets lose their order, lists and queues keep it."""
    freezer = _freezer(thing.__class__)
    return thing if freezer is None else freezer(thing, without)


@cache
def _freezer(kind: type) -> Freezer | None:
    """How a thing of this class becomes a value; None: it is one."""
    if kind in MESSAGES:
        return lambda thing, without: plain(thing)
    if issubclass(kind, (*PLAIN, msgspec.Struct)):
        AS_IT_IS.add(kind)
        return None
    if issubclass(kind, Counter):
        return lambda thing, without: frozenset([item for item in thing.items() if item[1]])
    if issubclass(kind, dict):
        return _freeze_dict
    if issubclass(kind, set | frozenset):
        return lambda thing, without: frozenset(thing)
    if issubclass(kind, list | tuple | deque):
        return _freeze_items
    if issubclass(kind, bytearray):
        return lambda thing, without: bytes(thing)
    return _freeze_object


def _freeze_dict(thing: dict[Any, Any], without: frozenset[str]) -> Any:
    return frozenset(
        [(key, value if value.__class__ in AS_IT_IS else freeze(value, without)) for key, value in thing.items()]
    )


def _freeze_items(things: Iterable[Any], without: frozenset[str]) -> Any:
    return tuple([thing if thing.__class__ in AS_IT_IS else freeze(thing, without) for thing in things])


def _freeze_object(thing: Any, without: frozenset[str]) -> Any:
    return _freeze_items(_values(thing.__class__, without)(thing), without)


@cache
def _values(kind: type, without: frozenset[str]) -> Callable[[Any], Iterable[Any]]:
    """Gives what counts of an object of this class, in the order of its fields."""
    if dataclasses.is_dataclass(kind):
        names: Iterable[str] = (field.name for field in dataclasses.fields(kind))
    else:
        names = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    names = tuple(names)
    if not names:
        return lambda thing: [value for name, value in vars(thing).items() if name not in without]
    kept = [name for name in names if name not in without]
    return attrgetter(*kept) if len(kept) > 1 else lambda thing: [getattr(thing, name) for name in kept]
