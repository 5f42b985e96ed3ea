"""A canonical value for an object graph: equal states freeze to equal, hashable values.

What is only counted or only said to people is no state (`NOT_STATE`): repeats of a message, reasons, statistics.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from enum import Enum
from functools import cache
from typing import Any

import msgspec

NOT_STATE = frozenset(
    [
        "cause",
        "repeats",
        "stale",
        "ended",
        "closed_by",
        "opened",
        "unsound",
        "faults",
        "taints",
        "_posts",
        "_on_release",
        "_return_pages",
        "_return_rows",
        "fingerprint",
    ]
)
PLAIN = (int, str, bytes, float, type(None), Enum, msgspec.Struct)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    return tuple(name for name in names if name not in NOT_STATE)


def freeze(thing: Any) -> Any:
    """Dicts and sets lose their order, lists and queues keep it."""
    if isinstance(thing, PLAIN):
        return thing
    if isinstance(thing, Counter):
        return frozenset([item for item in thing.items() if item[1]])
    if isinstance(thing, dict):
        return frozenset([(key, freeze(value)) for key, value in thing.items()])
    if isinstance(thing, set | frozenset):
        return frozenset(thing)
    if isinstance(thing, list | tuple | deque):
        return tuple([freeze(item) for item in thing])
    if isinstance(thing, bytearray):
        return bytes(thing)
    names = _fields(type(thing))
    if names:
        return tuple([freeze(getattr(thing, name)) for name in names])
    return tuple([(key, freeze(value)) for key, value in vars(thing).items() if key not in NOT_STATE])
