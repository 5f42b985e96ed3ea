"""Runs one worker as the product does, with messages of its hand-offs lost, repeated and delayed at random.

`python -m quiesce.lab.soak.chaos ROLE MODEL ...`: the words of `quiesce ROLE`. Only messages between workers are
touched: they repeat what matters, and that is what is tried here.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quiesce.core.messages import HandOff, Ping, Pong
from quiesce.roles import assembly
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.worker import Worker

SHARE = 0.02  # of all messages, for each of the three fates
LATEST = 0.4  # seconds of a delay

Send = Callable[..., bool]


@dataclass
class Chaos:
    worker: Worker
    draw: random.Random
    _late: itertools.count[int] = field(default_factory=itertools.count)

    def attach(self) -> None:
        self.worker.listener.send = self.around(self.worker.listener.send)  # type: ignore[method-assign]
        if isinstance(self.worker, DecodeWorker):
            reach, met = self.worker.peers.reach, set[int]()

            def reach_through(*arguments: Any) -> Any:
                peer = reach(*arguments)
                if id(peer.link) not in met:
                    met.add(id(peer.link))
                    peer.link.send = self.around(peer.link.send)  # type: ignore[method-assign]
                return peer

            self.worker.peers.reach = reach_through  # type: ignore[method-assign,assignment]

    def around(self, send: Send) -> Send:
        def sent(*arguments: Any) -> bool:
            if not isinstance(arguments[-1], HandOff | Ping | Pong):
                return send(*arguments)
            fate = self.draw.random() / SHARE
            if fate < 1:
                return True
            if fate < 2:
                return send(*arguments) and send(*arguments)
            if fate < 3:
                delay = self.draw.uniform(0.0, LATEST)
                self.worker.timers.after(delay, ("late", next(self._late)), lambda: send(*arguments))
                return True
            return send(*arguments)

        return sent


def main() -> int:
    from quiesce.cli import main as command  # noqa: PLC0415  (the product's own command line)

    make = assembly.make_worker

    def make_with_chaos(*arguments: Any) -> Any:
        worker = make(*arguments)
        Chaos(worker, random.Random(os.getpid())).attach()
        return worker

    setattr(assembly, "make_worker", make_with_chaos)  # noqa: B010
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
