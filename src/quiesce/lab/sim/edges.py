"""Where the product ends and the model begins: the names that stand for sockets, keys, threads, clocks and chance.

Everything else that runs in a simulated cluster is the product: router, workers, core. The names are put back when
the simulation is over.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import pkgutil
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import quiesce.roles
import quiesce.router
from quiesce.lab.mutants.patch import Change
from quiesce.lab.sim.clock import SimTime
from quiesce.lab.sim.engine import SimThread
from quiesce.lab.sim.network import Network, SimKeys, SimLink, SimListener
from quiesce.roles import decode, prefill, prefill_peers, registration, revoking, worker
from quiesce.roles.late import Asking, Turns
from quiesce.roles.meters import Holds
from quiesce.roles.ownership import OwnershipLog
from quiesce.roles.timers import Delays, Timers
from quiesce.router import dispatch

REGISTRY = "router"  # endpoint and key of the router


class Chance:
    """Stands where a module has imported `secrets`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def randbits(self, bits: int) -> int:
        return self._rng.getrandbits(bits)

    def token_hex(self, count: int) -> str:
        return f"{self._rng.getrandbits(8 * count):0{2 * count}x}"


class Nothing:
    """A poller, a context, an authenticator: there is nothing to wait for."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


class Awake(Nothing):
    """As `roles.wakes.Wakes`, where a turn looks everywhere."""

    def any_of(self, *readables: Any) -> bool:
        return True


class Faults(Nothing):
    """Stands where the worker's loop has its log: remembers the faults that the loop survives."""

    last: BaseException | None = None

    def exception(self, *said: Any, **more: Any) -> None:
        self.last = sys.exc_info()[1]


class NoGrammars:
    """As `roles.compiling.Compiler`, where no request has a grammar."""

    def __init__(self, grammars: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def failures(self) -> list[tuple[str, str]]:
        return []

    def stop(self) -> None:
        pass


def _modules(*packages: Any) -> Iterator[Any]:
    """Those that are loaded: a builder of sockets that nobody imports needs no clock of ours."""
    for package in packages:
        for found in pkgutil.iter_modules(package.__path__):
            name = f"{package.__name__}.{found.name}"
            if name in sys.modules:
                yield importlib.import_module(name)


def _changes(
    clock: SimTime, rng: random.Random, net: Network, router_loop: Any, fence_poll: float, faults: Faults
) -> Iterator[Change]:
    chance = Chance(rng)
    for module in _modules(quiesce.roles, quiesce.router):
        for name, real, model in (("time", time, clock), ("secrets", secrets, chance)):
            if getattr(module, name, None) is real:
                yield Change(module, name, model)
    now = clock.monotonic
    yield Change(revoking, "FENCE_POLL", fence_poll)
    yield Change(worker, "zmq", SimpleNamespace(Context=Nothing, POLLIN=0))
    yield Change(worker, "Wakes", Awake)
    yield Change(registration, "KeyPair", SimpleNamespace(load=lambda path: SimKeys(Path(path).stem)))
    yield Change(worker, "KeyRing", lambda path: None)
    yield Change(worker, "start_authenticator", lambda context, ring: Nothing())
    yield Change(registration, "Listener", lambda context, bind, keys: SimListener(net, bind, keys))
    yield Change(worker, "EngineThread", SimThread)
    yield Change(worker, "log", faults)
    yield Change(worker, "Compiler", NoGrammars)
    yield Change(worker, "Timers", functools.partial(Timers, now=now))
    yield Change(worker, "Delays", functools.partial(Delays, jitter=rng.random))
    yield Change(worker, "Holds", functools.partial(Holds, clock=now))
    yield Change(worker, "OwnershipLog", functools.partial(OwnershipLog, entries=1, clock=now))
    yield Change(decode, "Asking", functools.partial(Asking, now=now))
    yield Change(prefill, "Turns", functools.partial(Turns, now=now))
    yield Change(registration, "Link", lambda context, endpoint, key, keys: SimLink(net, endpoint, False))
    yield Change(prefill_peers, "Link", lambda context, endpoint, key, keys: SimLink(net, endpoint, True))
    yield Change(dispatch, "asyncio", SimpleNamespace(**vars(asyncio) | {"get_running_loop": lambda: router_loop}))


@contextmanager
def edges(
    clock: SimTime, rng: random.Random, net: Network, router_loop: Any, fence_poll: float, faults: Faults
) -> Iterator[None]:
    """`fence_poll`: seconds between two looks whether a fence was had; a real worker looks more often."""
    with ExitStack() as stack:
        for change in list(_changes(clock, rng, net, router_loop, fence_poll, faults)):
            stack.enter_context(change.made())
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
