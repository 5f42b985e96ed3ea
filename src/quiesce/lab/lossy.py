"""A channel that misbehaves on purpose: it drops, doubles or delays chosen messages of one worker.

It wraps the send of a worker's listener and of its links to peers; what is not chosen passes unchanged. Which
message: the n-th of its kind that this worker sends, so that a run meets each fate exactly once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from quiesce.channel import Link
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.worker import Worker

Send = Callable[..., bool]
GATE_POLL = 0.005  # seconds


class Mischief(msgspec.Struct, frozen=True):
    """What happens to message `number` (from 1) of the kind `message`, a class name of core/messages.py. A delay
    `while_there` meets every message of the kind that is sent while that file exists, until it does not."""

    message: str
    fate: Literal["drop", "duplicate", "delay"]
    number: int = 1
    seconds: float = 0.0  # of a delay
    while_there: str = ""


class Lossy:
    """Attach once, before the worker runs. `done` counts the fates that came about, as `drop Done`."""

    def __init__(self, worker: Worker, mischief: tuple[Mischief, ...]) -> None:
        self._timers = worker.timers
        self._fates = {(one.message, one.number): one for one in mischief if not one.while_there}
        self._gates = {one.message: Path(one.while_there) for one in mischief if one.while_there}
        self._sent: Counter[str] = Counter()
        self._late = itertools.count(1)
        self.done: Counter[str] = Counter()
        worker.listener.send = self._around(worker.listener.send)  # type: ignore[method-assign]
        if isinstance(worker, DecodeWorker):
            self._wrap_links(worker)
        tables = worker.tables
        worker.tables = lambda: {**tables(), "mischief": dict(self.done)}  # type: ignore[method-assign]

    def _wrap_links(self, worker: DecodeWorker) -> None:
        reach, wrapped = worker.peers.reach, set[Link]()

        def reach_lossy(*arguments: Any) -> Any:
            peer = reach(*arguments)
            if peer.link not in wrapped:
                wrapped.add(peer.link)
                peer.link.send = self._around(peer.link.send)  # type: ignore[method-assign]
            return peer

        worker.peers.reach = reach_lossy  # type: ignore[method-assign,assignment]

    def _around(self, send: Send) -> Send:
        def lossy(*arguments: Any) -> bool:
            kind = type(arguments[-1]).__name__
            self._sent[kind] += 1
            gate = self._gates.get(kind)
            if gate is not None and gate.exists():
                self.done[f"delay {kind}"] += 1
                self._when_gone(gate, lambda: send(*arguments))
                return True
            fate = self._fates.get((kind, self._sent[kind]))
            if fate is None:
                return send(*arguments)
            self.done[f"{fate.fate} {kind}"] += 1
            if fate.fate == "delay":
                self._timers.after(fate.seconds, ("late", next(self._late)), lambda: send(*arguments))
                return True
            return fate.fate == "drop" or (send(*arguments) and send(*arguments))

        return lossy

    def _when_gone(self, gate: Path, act: Callable[[], Any]) -> None:
        if not gate.exists():
            act()
            return
        self._timers.after(GATE_POLL, ("late", next(self._late)), lambda: self._when_gone(gate, act))
