"""Real workers and a bare router in one hand: what a test needs to abort, kill and count at the exact moment.

It pairs legs and cancels the other one as the product's router does, over the same authenticated sockets, and
speaks token ids, so that answers can be compared with the oracle's without a tokenizer in between.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quiesce.channel import KeyPair, KeyRing, Link, LinkEvent, Listener, start_authenticator
from quiesce.core.messages import (
    Address,
    Cancel,
    Drawn,
    Ended,
    Inspect,
    Inspected,
    Register,
    Registered,
    Sampling,
    Start,
    Tokens,
)
from quiesce.lab.process import WorkerProcess
from quiesce.lab.worker import Faults, Spec

ROUTER_EPOCH = 7
Oracle = Callable[..., list[list[int]]]  # (prompts, tokens of each answer) -> answers of one process alone
TURN_MS = 2  # how long the cluster waits for news at a time


@dataclass(eq=False)
class LabRequest:
    """One request and what came of it. `ends` counts last words by leg: each must be exactly one."""

    rid: str
    prompt: tuple[int, ...]
    workers: tuple[str, ...]
    started: float
    first_token: float | None = None
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # when each message with tokens came
    ends: dict[str, list[Ended]] = field(default_factory=dict)
    cancelled: bool = False
    lost: dict[str, str] = field(default_factory=dict)  # worker that will never say its last word -> why
    errors: list[str] = field(default_factory=list)  # what its client was told instead of an answer

    @property
    def answerer(self) -> str:
        return self.workers[-1]

    @property
    def over(self) -> bool:
        return all(self.ends.get(worker) or worker in self.lost for worker in self.workers)

    @property
    def told(self) -> bool:
        """The client has its answer or an error."""
        return bool(self.errors) or self.outcome is not None

    @property
    def outcome(self) -> str | None:
        ended = self.ends.get(self.answerer)
        return ended[0].outcome if ended else None


@dataclass(eq=False)
class LabWorker:
    name: str
    role: str
    process: WorkerProcess
    killed: bool = False
    heard: float = 0.0  # when its last heartbeat was read
    cautions: tuple[str, ...] = ()  # of that heartbeat
    transfers: tuple[str, ...] = ()  # likewise
    address: Address | None = None
    link: Link | None = None
    inspected: Inspected | None = None


class Cluster:
    """Use as a context manager: no process, socket or shared memory outlives it."""

    def __init__(self, model: Path, run_dir: Path, log: Path | None = None, **common: Any) -> None:
        self.model = model
        self.run_dir = run_dir
        self.common = common
        self.keys = run_dir / "keys"
        self.ring = KeyRing(self.keys / "ring")
        self.router_keys = self._key("router")
        self.router_epoch = ROUTER_EPOCH
        self.limit = 0  # what workers are told that all have agreed on
        self.patience = 0.0  # of the workers' engines with an attachment, in seconds; 0: the product's
        self.workers: dict[str, LabWorker] = {}
        self.requests: dict[str, LabRequest] = {}
        self._log = log or run_dir / "workers.log"
        self._inspections = 0
        self._processes: list[WorkerProcess] = []
        self._open_registry()

    def _open_registry(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.authenticator = start_authenticator(self.context, self.ring)
        self.registry = Listener(self.context, f"ipc://{self.run_dir}/registry.sock", self.router_keys)

    def _key(self, name: str) -> KeyPair:
        self.keys.mkdir(parents=True, exist_ok=True)
        pair = KeyPair.generate()
        pair.save(self.keys / f"{name}.key")
        self.ring.add(name, pair.public)
        return pair

    # ------------------------------------------------------------ workers

    def spawn(self, role: str, name: str, faults: Faults | None = None, **settings: Any) -> LabWorker:
        """Starts a worker, or a successor under the same name; `wait_for` tells when it serves."""
        return self.install(role, name, self.launch(role, name, faults, **settings))

    def install(self, role: str, name: str, process: WorkerProcess) -> LabWorker:
        """The process bears the name from now on; one that was launched `held` is let go."""
        before = self.workers.get(name)
        if before is not None and before.link is not None:
            self.went_down(before)
            before.link.close()
        process.let_go()
        worker = self.workers[name] = LabWorker(name, role, process)
        return worker

    def launch(
        self, role: str, name: str, faults: Faults | None = None, *, held: bool = False, **settings: Any
    ) -> WorkerProcess:
        """Starts a process. `held`: it loads the model and waits for `install`, so that it serves at once then."""
        if not (self.keys / f"{name}.key").exists():
            self._key(name)
        plain = {
            "role": role,
            "name": name,
            "model": str(self.model),
            "served_model_name": "lab",
            "registry": self.registry.endpoint,
            "registry_public_key": self.router_keys.public,
            "keys": str(self.keys),
            "run_dir": str(self.run_dir),
            "dtype": "float32",
            "deterministic": True,
            "log_level": "warning",
            **self.common,
            **settings,
        }
        path = self.run_dir / f"{name}-{len(self._processes)}.json"
        path.write_bytes(msgspec.json.encode(Spec(plain, faults or Faults(), held, self.patience)))
        process = WorkerProcess(path, self._log)
        self._processes.append(process)
        return process

    def wait_for(self, *names: str, seconds: float = 300.0) -> None:  # on a busy machine a start takes minutes
        """Until they have registered."""
        self.until(lambda: all(self._serves(name) for name in names), seconds, f"{names} to register")

    def _serves(self, name: str) -> bool:
        worker = self.workers[name]
        if worker.process.returncode is not None:
            raise RuntimeError(f"{name} exited with {worker.process.returncode}: see {self._log}")
        return worker.link is not None and worker.link.is_up

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[name].process.pid, number)
        if number == signal.SIGKILL:
            self.workers[name].killed = True
            self.workers[name].process.wait()

    # ------------------------------------------------------------ requests

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        workers: Sequence[str],
        deadline: float = 60.0,
        group: str = "",
        prefill: Address | None = None,
        room: int | None = None,
    ) -> LabRequest:
        """`workers`: (prefill, decode) or (colocated,). Both legs start at once. With an address of your own as
        `prefill`, (decode,) alone. `room`: by default a fresh one."""
        rid, room = secrets.token_hex(8), secrets.randbits(63) if room is None else room
        request = LabRequest(rid, tuple(prompt), tuple(workers), time.monotonic())
        self.requests[rid] = request
        named = self.workers[workers[0]].address if len(workers) == 2 else None
        for name in workers:
            leg = Start(
                rid=rid,
                router_epoch=self.router_epoch,
                room=room,
                token_ids=request.prompt,
                sampling=sampling,
                deadline_ms=int(deadline * 1000),
                prefill=named if name != workers[0] else prefill,
                group=group,
            )
            self._send(name, leg)
        return request

    def until_served(self, ask: Callable[[], LabRequest], seconds: float = 90.0) -> None:
        """Asks until one is answered. Sessions and what moves the pages are made by the first request, which may take
        longer than a short hold timeout on a busy machine: then it ends, and the next one finds them."""
        limit = time.monotonic() + seconds
        while True:
            request = ask()
            self.until(lambda request=request: request.over, seconds, "a first answer")  # type: ignore[misc]
            if request.outcome == "length":
                return
            if time.monotonic() > limit:
                raise TimeoutError(f"nobody was served for {seconds:g} s: {request.ends}")

    def cancel(self, request: LabRequest, reason: str = "client gone") -> None:
        request.cancelled = True
        for name in request.workers:
            if not request.ends.get(name):
                self._send(name, Cancel(request.rid, reason))

    def _send(self, name: str, message: Start | Cancel | Inspect) -> None:
        link = self.workers[name].link
        if link is None or not link.send(message):
            raise RuntimeError(f"{type(message).__name__} could not be sent to {name}")

    # ------------------------------------------------------------ news

    def turn(self) -> None:
        """Takes what has arrived; waits a moment when nothing has."""
        heard = False
        for received in self.registry.receive():
            if isinstance(received.message, Register):
                self._registered(received.message)
                self.registry.send(received.sender, Registered(self.router_epoch, self.limit))
        for worker in list(self.workers.values()):
            if worker.link is None:
                continue
            was_up = worker.link.is_up
            down = [change for change in worker.link.state_changes() if change is LinkEvent.DOWN]
            for message in worker.link.receive():
                heard = True
                self._take(worker, message)
            if was_up and down:
                self.went_down(worker)
        if not heard:
            self.registry.socket.poll(TURN_MS)

    def went_down(self, worker: LabWorker) -> None:
        """The connection to it closed: it is dead, or has gone away."""

    def _registered(self, register: Register) -> None:
        worker = self.workers.get(register.address.name)
        if worker is None:
            return
        worker.heard, worker.cautions = time.monotonic(), register.cautions
        worker.transfers = register.transfers
        if worker.address == register.address:
            return
        if worker.address is not None and worker.link is not None:
            worker.link.close()
        worker.address = register.address
        worker.link = Link(self.context, register.address.endpoint, register.address.public_key, self.router_keys)

    def _take(self, worker: LabWorker, message: object) -> None:
        if isinstance(message, Inspected):
            worker.inspected = message
            return
        if isinstance(message, Drawn):
            for rid, token in zip(message.rids, message.token_ids, strict=True):
                self._take(worker, Tokens(rid, (token,)))
            return
        request = self.requests.get(getattr(message, "rid", ""))
        if request is None:
            return
        if isinstance(message, Tokens):
            request.arrivals.append(time.monotonic())
            request.first_token = request.arrivals[0]
            request.tokens.extend(message.token_ids)
        elif isinstance(message, Ended):
            request.ends.setdefault(worker.name, []).append(message)
            if message.outcome in ("failed", "refused", "cancelled"):
                if worker.name != request.answerer and not request.tokens:
                    request.errors.append(message.reason)
                self.give_up(request, message.reason)

    def give_up(self, request: LabRequest, reason: str) -> None:
        """Ends the legs that are still open, as far as their workers can be reached."""
        for name in request.workers:
            link = self.workers[name].link
            if not request.ends.get(name) and name not in request.lost and link is not None:
                link.send(Cancel(request.rid, reason))

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                raise TimeoutError(f"waited {seconds} s for {what}")
            for worker in self.workers.values():
                if not worker.killed and worker.process.returncode is not None:
                    raise RuntimeError(f"{worker.name} exited with {worker.process.returncode}, see {self._log}")
            self.turn()

    def until_time(self, seconds: float) -> None:
        """Goes on listening for so long."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self.turn()

    def inspect(self, name: str, seconds: float = 30.0, page: int | None = None) -> dict[str, Any]:
        """What the worker says of itself now, or of one page; the metric samples under `samples`."""
        worker = self.workers[name]
        self._inspections += 1
        worker.inspected = None
        self._send(name, Inspect(self._inspections, page))
        self.until(lambda: worker.inspected is not None, seconds, f"{name} to answer")
        assert worker.inspected is not None
        return {**worker.inspected.state, "samples": worker.inspected.samples}

    def router_dies(self) -> None:
        """Every socket of the router closes, as its process's would. Nothing but `router_returns` may follow."""
        for worker in self.workers.values():
            if worker.link is not None:
                worker.link.close()
            worker.link = worker.address = None
        self.registry.close()
        self.authenticator.stop()
        self.context.term()

    def router_returns(self) -> None:
        """A new process at the same address, with the same key and a new epoch."""
        self.router_epoch += 1
        self._open_registry()

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self.router_dies()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
