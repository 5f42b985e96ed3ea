"""The router's place in `bench.loop`: starts and cancels legs over the real channel, and reads what comes of them.

Run by bench.loop:  python -m bench.loop_client KEYS ENDPOINT WORKER_KEY CORE
A line `START n SAMPLING`, JSON, begins n legs; `CANCEL` ends all; each is answered with the tokens read so far.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import zmq

from quiesce.channel import KeyPair, Link
from quiesce.core.messages import Cancel, Drawn, Sampling, Start, Tokens

ROOT = Path(__file__).parent.parent
EPOCH = 1
LONG_MS = 3_600_000


class Order(msgspec.Struct):
    """`start` legs with prompts of `prompt` tokens, or (0) cancel all that run."""

    start: int
    prompt: int = 0
    sampling: Sampling = Sampling(1)


class Told(msgspec.Struct):
    tokens: int


class Client:
    """The other process, as the bench holds it."""

    def __init__(self, keys: Path, endpoint: str, worker_key: str, core: int, meanwhile: Callable[[], None]) -> None:
        command = [sys.executable, "-m", "bench.loop_client", str(keys), endpoint, worker_key, str(core)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read(meanwhile)  # connected

    def order(self, order: Order, meanwhile: Callable[[], None]) -> int:
        """Carried out when this returns; tokens read until then. `meanwhile` keeps the worker going."""
        stdin = _there(self._process.stdin)
        stdin.write(msgspec.json.encode(order) + b"\n")
        stdin.flush()
        return self._read(meanwhile).tokens

    def _read(self, meanwhile: Callable[[], None]) -> Told:
        stdout = _there(self._process.stdout)
        while not select.select([stdout], [], [], 0)[0]:
            meanwhile()
        line = stdout.readline()
        if not line:
            raise RuntimeError("the client's process has ended; its own messages are above")
        return msgspec.json.decode(line, type=Told)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class Legs:
    """In its own process: sends what was ordered, and reads for ever."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: list[str] = []
        self._begun = 0
        self.tokens = 0

    def carry_out(self, order: Order) -> None:
        if not order.start:
            for rid in self._open:
                self._send(Cancel(rid, "the round is over"))
            self._open.clear()
        for _ in range(order.start):
            self._begun += 1
            rid = f"r{self._begun}"
            prompt = tuple(range(1, order.prompt + 1))
            self._send(Start(rid, EPOCH, self._begun, prompt, order.sampling, LONG_MS))
            self._open.append(rid)

    def read(self) -> None:
        for message in self._link.receive(4096):
            if isinstance(message, Tokens | Drawn):
                self.tokens += len(message.token_ids)

    def _send(self, message: Any) -> None:
        while not self._link.send(message):
            self.read()


def main(keys: Path, endpoint: str, worker_key: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    context: zmq.Context[Any] = zmq.Context()
    link = Link(context, endpoint, worker_key, KeyPair.load(keys / "router.key"))
    while not link.is_up:
        link.monitor.poll(1000)
        link.state_changes()
    legs, poller = Legs(link), zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(0, zmq.POLLIN)
    print(msgspec.json.encode(Told(0)).decode(), flush=True)
    while True:
        ready = dict(poller.poll())
        legs.read()
        if 0 in ready:
            line = sys.stdin.buffer.readline()
            if not line:
                return
            legs.carry_out(msgspec.json.decode(line, type=Order))
            print(msgspec.json.encode(Told(legs.tokens)).decode(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
