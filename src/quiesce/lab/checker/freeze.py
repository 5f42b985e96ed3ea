"""A canonical value for an object graph: equal states freeze to equal, hashable values.

What is only counted or only said to people is no state (`NOT_STATE`): reasons, repeats, statistics. `PACING` is
what only decides how often something is said again: no state either where a sent message stays deliverable.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from enum import Enum
from functools import cache
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
PLAIN = (int, str, bytes, float, type(None), Enum, msgspec.Struct)


def plain(message: Any) -> Any:
    """A message without what is only for people or for pacing, and hashable."""
    if isinstance(message, Report):
        return msgspec.structs.replace(message, cause="")
    if isinstance(message, Entry) and isinstance(message.what, Hold):
        return msgspec.structs.replace(message, what=Hold(message.what.tid, ""))
    if isinstance(message, Entry) and isinstance(message.what, Finish):
        return msgspec.structs.replace(message, what=Finish(message.what.tid, ""))
    if isinstance(message, Abort | Failed):
        return msgspec.structs.replace(message, reason="")
    if isinstance(message, Busy):
        return msgspec.structs.replace(message, posts=0)
    if isinstance(message, Accept):
        return msgspec.structs.replace(message, place=0)
    if isinstance(message, Ping):
        return msgspec.structs.replace(message, open_seqs=tuple(message.open_seqs))
    return message


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))


def freeze(thing: Any, without: frozenset[str] = NOT_STATE) -> Any:
    """Dicts and sets lose their order, lists and queues keep it."""
    if isinstance(thing, PLAIN):
        return plain(thing)
    if isinstance(thing, Counter):
        return frozenset([item for item in thing.items() if item[1]])
    if isinstance(thing, dict):
        return frozenset([(key, freeze(value, without)) for key, value in thing.items()])
    if isinstance(thing, set | frozenset):
        return frozenset(thing)
    if isinstance(thing, list | tuple | deque):
        return tuple([freeze(item, without) for item in thing])
    if isinstance(thing, bytearray):
        return bytes(thing)
    names = _fields(thing.__class__) or tuple(vars(thing))
    return tuple([freeze(getattr(thing, name), without) for name in names if name not in without])
