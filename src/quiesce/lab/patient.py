"""The lab's router with the product's patience: whom it gives up, and when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from quiesce.lab.cluster import Cluster, LabRequest, LabWorker

PREFILL, DECODE = PAIR = ("prefill-0", "decode-0")
PAGE, CHUNK = 16, 64
SIZES: dict[str, Any] = {
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "max_running": 8,
    "context_length": 384,
}
AWAY_MYSELF = 0.5  # seconds between two turns after which heartbeats wait in the inbox


class PatientRouter(Cluster):
    """Ends requests as the product's router does: at once when a worker's connection closes, after the hold timeout
    when a worker is silent, and a pause of its own is not the silence of others."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        log: Path | None = None,
        *,
        hold_timeout: float = 2.0,
        **settings: Any,
    ) -> None:
        """`settings`: of every worker, beside those of the matrix."""
        super().__init__(model, run_dir, log, hold_timeout=hold_timeout, **{**SIZES, **settings})
        self.hold = hold_timeout
        self._turned = time.monotonic()

    def __enter__(self) -> PatientRouter:
        return self

    def turn(self) -> None:
        now = time.monotonic()
        if now - self._turned > AWAY_MYSELF:
            for worker in self.workers.values():
                worker.heard = max(worker.heard, now)
        self._turned = now
        super().turn()
        for worker in self.workers.values():
            if worker.heard and now - worker.heard > self.hold:
                for request in self._waiting_for(worker):
                    request.errors.append(f"{worker.name} has sent no heartbeat for {now - worker.heard:.1f} s")
                    self.give_up(request, request.errors[0])

    def _waiting_for(self, worker: LabWorker) -> list[LabRequest]:
        """Prefill is not needed any more once there is a token, or its word that it has handed over."""
        return [
            request
            for request in self.requests.values()
            if worker.name in request.workers
            and not request.told
            and not (worker.name == PREFILL and (request.tokens or request.ends.get(PREFILL)))
        ]

    def went_down(self, worker: LabWorker) -> None:
        for request in self._waiting_for(worker):
            request.errors.append(f"{worker.name} closed its connection")
        for request in self.requests.values():
            if worker.name in request.workers and not request.ends.get(worker.name):
                request.lost.setdefault(worker.name, "closed its connection")
                if request.errors:
                    self.give_up(request, request.errors[0])


def mover_of(pid: int) -> int | None:
    """The living mover process beside a prefill engine."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and b"quiesce.transfer.mover" in words:
            return int(entry.name)
    return None
