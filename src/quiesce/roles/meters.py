"""What takes time on a worker: waits, transfers, holds and answers to ABORT, as histograms under `quiesce:`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram

from quiesce.core.ledger import REMOTE_WRITERS, Change, Ledger
from quiesce.core.messages import (
    Abort,
    Busy,
    Done,
    Drained,
    HandOff,
    NeverStarted,
    Refused,
    Sample,
    Tainted,
    TransferId,
)
from quiesce.core.proofs import Proof, Waiver

log = logging.getLogger("quiesce.holds")

MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)
SECONDS = tuple(ms / 1000 for ms in MILLISECONDS)
MEGABYTES = (0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000, 5000)
SPEEDS = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100)  # GB/s
LONG_HOLD = 1.0  # seconds; a hold that took longer is worth a line
WORDS = (Drained, NeverStarted, Tainted, Busy, Done, Refused)  # what answers an ABORT


def histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"quiesce:{name}", text, buckets=buckets, registry=registry)


def collected(registry: CollectorRegistry) -> list[Sample]:
    """Everything in a registry, as samples for the router's /metrics."""
    kinds: dict[str, Literal["counter", "gauge", "histogram"]] = {
        "counter": "counter",
        "gauge": "gauge",
        "histogram": "histogram",
    }
    return [
        Sample(sample.name, kinds[family.type], family.documentation, tuple(sample.labels.items()), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


class Waits:
    """Durations of the legs that have ended on this worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue = histogram(
            self.registry, "queue_time_seconds", "From a leg's arrival to its first KV pages", SECONDS
        )

    def samples(self) -> list[Sample]:
        return collected(self.registry)


class Transfers:
    """Hand-offs that went well, as this side saw them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latency = histogram(
            self.registry,
            "kv_transfer_latency_ms",
            "Of a hand-off. Prefill: first page posted to all landed. Decode: offered to committed",
            MILLISECONDS,
        )
        self.size = histogram(self.registry, "kv_transfer_total_mb", "KV bytes of a hand-off, in 10^6", MEGABYTES)
        self.speed = histogram(
            self.registry, "kv_transfer_speed_gb_s", "Size over latency of a hand-off, in 10^9 bytes/s", SPEEDS
        )

    def observe(self, seconds: float, size: int) -> None:
        """size: bytes of KV."""
        self.latency.observe(seconds * 1000)
        self.size.observe(size / 1e6)
        self.speed.observe(size / 1e9 / max(seconds, 1e-6))

    def samples(self) -> list[Sample]:
        return collected(self.registry)


class Holds:
    """Pages of ended requests that wait for a remote writer's proof: an observer of the ledger.

    A hold begins when a request ends while a remote rank may still write its pages, and ends when they return.
    Its outcome is the last proof about it.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._began: dict[TransferId, float] = {}
        self._proofs: dict[TransferId, str] = {}
        self._asked: dict[TransferId, float | None] = {}  # when ABORT was said; None: it was answered
        self._posts: dict[TransferId, tuple[float, int]] = {}  # when BUSY came, and how old its oldest write was, ms
        self.outcomes: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.seconds = histogram(
            self.registry,
            "decode_deferred_kv_release_seconds",
            "How long pages of an ended request waited for a proof",
            SECONDS,
        )
        self.answers = histogram(
            self.registry, "decode_abort_answer_seconds", "From the first ABORT to the first answer to it", SECONDS
        )

    def __len__(self) -> int:
        return len(self._began)

    def oldest(self) -> float:
        """Age in seconds of the oldest hold; 0 when there is none."""
        return self._clock() - min(self._began.values()) if self._began else 0.0

    def oldest_post(self) -> float:
        """Age in seconds of the oldest write of a hold that prefill has not finished, as far as it said; 0: none."""
        now = self._clock()
        return max((now - heard + ms / 1000 for heard, ms in self._posts.values()), default=0.0)

    # ------------------------------------------------------------ what the ledger tells

    def observe(self, change: Change) -> None:
        event, tid, pages, lease, closed_by = change
        if isinstance(closed_by, Waiver):
            said = "a lease of %d pages was closed without proof, so they may be touched by a peer: %s"
            log.warning(said, len(pages), closed_by.reason, extra={"transfer": str(tid)})
        if event == "ended":
            writers = [key for key in self._ledger.leases(tid) if key.kind in REMOTE_WRITERS]
            if writers:
                self._began[tid] = self._clock()
        elif event == "closed" and tid in self._began and lease is not None and lease.key.kind in REMOTE_WRITERS:
            self._proofs[tid] = closed_by.kind.value if isinstance(closed_by, Proof) else "unsound"
        elif event == "retained" and tid in self._began:
            age = self._clock() - self._began[tid]
            log.warning("no proof after %.1f s: its pages are retained", age, extra={"transfer": str(tid)})
        elif event == "returned":
            self._asked.pop(tid, None)
            self._posts.pop(tid, None)
            if tid in self._began:
                self._returned(tid, self._clock() - self._began.pop(tid), self._proofs.pop(tid, "unsound"))

    def _returned(self, tid: TransferId, seconds: float, outcome: str) -> None:
        self.seconds.observe(seconds)
        self.outcomes[outcome] += 1
        level = logging.WARNING if outcome == "unsound" else logging.INFO if seconds > LONG_HOLD else logging.DEBUG
        log.log(level, "pages held for %.3f s came back: %s", seconds, outcome, extra={"transfer": str(tid)})

    # ------------------------------------------------------------ what goes over the wire

    def said(self, message: HandOff) -> None:
        if isinstance(message, Abort) and message.leg.tid in self._began:
            self._asked.setdefault(message.leg.tid, self._clock())

    def heard(self, message: HandOff) -> None:
        tid = message.leg.tid
        if isinstance(message, Busy) and tid in self._began:
            self._posts[tid] = (self._clock(), message.oldest_ms)
        if isinstance(message, WORDS) and (asked := self._asked.get(tid)) is not None:
            self.answers.observe(self._clock() - asked)
            self._asked[tid] = None  # repeats of the ABORT are not timed

    def samples(self) -> list[Sample]:
        return collected(self.registry)
