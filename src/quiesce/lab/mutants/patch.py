"""How a mutant is made: the real classes with one row or one method replaced, for the length of a `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quiesce.lab.worlds import World


@dataclass(frozen=True, slots=True)
class Change:
    """One row of a state table, or one attribute of a class or module."""

    where: Any
    name: Any
    new: Any

    @contextmanager
    def made(self) -> Iterator[None]:
        if isinstance(self.where, dict):
            old = self.where.get(self.name)
            self.where[self.name] = self.new
        else:
            old = getattr(self.where, self.name)
            setattr(self.where, self.name, self.new)
        try:
            yield
        finally:
            if not isinstance(self.where, dict):
                setattr(self.where, self.name, old)
            elif old is None:
                del self.where[self.name]
            else:
                self.where[self.name] = old


@dataclass(frozen=True, slots=True)
class Mutant:
    """`guards` removed by `changes`; `world` is where that shows. A pair has two guards: either alone suffices."""

    name: str
    guards: tuple[str, ...]
    about: str
    world: World
    changes: tuple[Change, ...]
    live: bool = False  # shows as a hold that never ends
    strict: bool = False  # shows before any damage is done

    @contextmanager
    def made(self) -> Iterator[None]:
        if not self.changes:
            yield
            return
        with self.changes[0].made(), Mutant(self.name, (), "", self.world, self.changes[1:]).made():
            yield


MUTANTS: list[Mutant] = []


def mutant(
    name: str,
    guards: str,
    about: str,
    world: World,
    *where: tuple[Any, Any],
    live: bool = False,
    strict: bool = False,
) -> Callable[[Any], Any]:
    """Decorates the replacement: `where` are the rows or methods that it replaces."""

    def register(new: Any) -> Any:
        changes = tuple(Change(place, name, new) for place, name in where)
        MUTANTS.append(Mutant(name, tuple(guards.split()), about, world, changes, live, strict))
        return new

    return register
