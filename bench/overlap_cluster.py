"""One router, one prefill worker and three ways to answer, for `bench.overlap`: a decode worker that a prompt's pages
reach over shm, one that they reach over `null`, which moves nothing, and a colocated worker.

The prefill worker has both engines at hand and uses for each decode worker the one that it offers; all else is what
`quiesce serve` starts. An operator's word to the router decides who is asked.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from quiesce.ops.run_dir import ROUTER, RunDir
from quiesce.roles import colocated, decode
from quiesce.roles.settings import RouterSettings, WorkerSettings
from quiesce.router import app

PREFILL = "prefill-0"
WAYS = {  # -> who has a part in it; the last one answers
    "shm": (PREFILL, "decode-shm"),
    "null": (PREFILL, "decode-null"),
    "colocated": ("colocated-0",),
}
START, END = 180.0, 15.0  # seconds
PAUSE = 0.1  # between looks at workers that are still starting
SIZES: dict[str, Any] = {"max_total_tokens": 16384, "context_length": 4096}


def prefill(settings: WorkerSettings) -> int:
    """A prefill worker that may be asked over either engine."""
    from quiesce.roles.assembly import make_engine, make_worker  # noqa: PLC0415  (torch loads here)
    from quiesce.transfer import registry  # noqa: PLC0415
    from quiesce.transfer.choice import Choice  # noqa: PLC0415

    setup = registry.Setup(
        run_dir=settings.run_dir, epoch=settings.epoch, max_transfer_pages=settings.max_transfer_pages
    )
    engine = make_engine(settings)
    transport = Choice([registry.make(name, setup) for name in ("shm", "null")], settings.epoch)
    return make_worker(settings, engine, transport).run()


def _run(role: Callable[[Any], int], settings: Any) -> None:
    """The life of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the bench, which ends its children
    logging.basicConfig(level=logging.ERROR)
    raise SystemExit(role(settings))


class Cluster:
    """Up when this returns; `close` ends it."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self._run_dir = model, RunDir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._children: dict[str, BaseProcess] = {}
        admin = httpx.HTTPTransport(uds=str(self._run_dir.path / "admin"))
        self._operator = httpx.Client(transport=admin, base_url="http://router", timeout=30.0)
        try:
            self._start(folder)
            self._await_workers()
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        run_dir = self._run_dir
        files = {"model": folder, "served_model_name": self.model, "keys": run_dir.keys, "registry": run_dir.registry}
        router = RouterSettings(**files, port=self.port, admin=run_dir.admin, log_level="error")
        self._child(ROUTER, app.run, router)
        key = run_dir.router_public_key_file.read_text("ascii").strip()
        worker = partial(
            WorkerSettings, **files, **SIZES, registry_public_key=key, run_dir=run_dir.path, allow_unproven=True
        )
        roles: dict[str, tuple[Callable[[Any], int], dict[str, Any]]] = {
            PREFILL: (prefill, {"role": "prefill"}),
            "decode-shm": (decode.run, {"role": "decode", "transfer": "shm"}),
            "decode-null": (decode.run, {"role": "decode", "transfer": "null"}),
            "colocated-0": (colocated.run, {"role": "colocated"}),
        }
        for name, (run, own) in roles.items():
            run_dir.fresh_keys(name)
            self._child(name, run, worker(name=name, **own))

    def _child(self, name: str, role: Callable[[Any], int], settings: Any) -> None:
        child = multiprocessing.get_context("spawn").Process(target=_run, args=(role, settings), name=name)
        child.start()
        self._children[name] = child

    def _await_workers(self) -> None:
        end = time.monotonic() + START
        wanted = self._children.keys() - {ROUTER}
        while time.monotonic() < end:
            for name, child in self._children.items():
                if child.exitcode is not None:
                    raise RuntimeError(f"{name} ended with {child.exitcode}; its messages are above")
            try:
                workers = self._operator.get("/workers").json()["workers"]
                if wanted == {worker["name"] for worker in workers if worker["trouble"] is None}:
                    return
            except httpx.TransportError:
                pass
            time.sleep(PAUSE)
        raise RuntimeError(f"not all workers were there within {START:.0f} s")

    def pid(self, name: str) -> int:
        pid = self._children[name].pid
        assert pid is not None
        return pid

    @property
    def pids(self) -> list[int]:
        return [self.pid(name) for name in self._children]

    def turn_to(self, way: str) -> None:
        """From now on the router gives work to those of this way alone."""
        for name in self._children.keys() - {ROUTER}:
            order = "resume" if name in WAYS[way] else "drain"
            self._operator.post(f"/workers/{name}/{order}").raise_for_status()

    def close(self) -> None:
        self._operator.close()
        for child in reversed(self._children.values()):
            child.terminate()
        for child in self._children.values():
            child.join(END)
            if child.is_alive():
                child.kill()
                child.join()
        self._run_dir.remove()
