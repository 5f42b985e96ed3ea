"""The exposition at /metrics: the front door's own instruments, and the workers' samples with a `worker` label."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quiesce.core.messages import Inspected, Sample

log = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FrontMetrics:
    """Instruments of one router process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "quiesce_http_requests",
            "Requests answered, by route and by status (499: the client left first).",
            ["route", "status"],
            registry=self.registry,
        )
        self.inflight = Gauge("quiesce_http_inflight", "Generation requests being served.", registry=self.registry)
        self.first_token = Histogram(
            "quiesce_time_to_first_token_seconds",
            "From the arrival of the request to its first token at the router.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "quiesce_request_duration_seconds",
            "From the arrival of the request to its last byte.",
            ["status"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "quiesce_request_tokens", "Tokens of finished requests.", ["kind"], registry=self.registry
        )

    def exposition(
        self, workers: Mapping[str, Inspected | str], counters: Mapping[str, int], legs: Mapping[str, int]
    ) -> bytes:
        """Prometheus text format, UTF-8."""
        scrape = CollectorRegistry()
        scrape.register(_Scrape(workers, counters, legs))
        return generate_latest(self.registry) + generate_latest(scrape)


class _Scrape(Collector):
    """What was asked of others for this one scrape."""

    def __init__(
        self, workers: Mapping[str, Inspected | str], counters: Mapping[str, int], legs: Mapping[str, int]
    ) -> None:
        self._workers, self._counters, self._legs = workers, counters, legs

    def collect(self) -> Iterable[Metric]:
        for name, value in sorted(self._counters.items()):
            yield CounterMetricFamily(f"quiesce_router_{name}", f"Router: {name.replace('_', ' ')}.", value=value)
        legs = GaugeMetricFamily("quiesce_router_legs", "Legs a worker has not ended yet.", labels=["worker"])
        for name, count in sorted(self._legs.items()):
            legs.add_metric([name], count)
        yield legs
        up = GaugeMetricFamily("quiesce_worker_answers", "1: the worker answered this scrape.", labels=["worker"])
        families: dict[str, Metric] = {}
        for name, answer in sorted(self._workers.items()):
            up.add_metric([name], float(isinstance(answer, Inspected)))
            if isinstance(answer, Inspected):
                for sample in answer.samples:
                    _add(families, name, sample)
        yield up
        yield from families.values()


def _add(families: dict[str, Metric], worker: str, sample: Sample) -> None:
    base = sample.name
    suffixes = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_sum", "_count", "_created")}
    for suffix in suffixes.get(sample.kind, ()):
        base = base.removesuffix(suffix)
    try:
        family = families.setdefault(base, Metric(base, sample.help, sample.kind))
    except ValueError as error:  # a name that is none: a worker's fault must not blind the whole scrape
        log.warning("worker %s has a sample that cannot be shown: %s", worker, error)
        return
    name = f"{base}_total" if sample.kind == "counter" else sample.name
    family.add_sample(name, {**dict(sample.labels), "worker": worker}, sample.value)
