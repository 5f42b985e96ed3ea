"""The exposition at /metrics: the front door's own instruments, and the workers' samples with a `worker` label."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quiesce.core.messages import Inspected, Sample

log = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class FrontMetrics:
    """Instruments of one router process, in a registry of their own. docs/metrics.md says what each means."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.started = self._counter("http_requests_started", "Generation requests that arrived.", "route")
        self.requests = self._counter(
            "http_requests", "Requests answered, by route and status (499: the client left first).", "route", "status"
        )
        self._not_let_in = self._counter(
            "http_not_let_in", "Requests without a key that is known (401), or not for their key (403).", "status"
        )
        for status in (401, 403):
            self._not_let_in.labels(str(status))
        self.inflight = Gauge("quiesce:http_inflight", "Generation requests being served.", registry=self.registry)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token at the router.", SECONDS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Between tokens of an answer, the first apart: its mean.", PER_TOKEN
        )
        self.duration = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last byte.", SECONDS, "status"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Answer tokens of finished requests.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in a cache.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quiesce:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"quiesce:{name}", text, labels, buckets=buckets, registry=self.registry)

    def not_let_in(self, status: int) -> None:
        self._not_let_in.labels(str(status)).inc()

    def expect(self, route: str) -> None:
        """Shows the route at 0 before its first request."""
        self.started.labels(route)
        self.requests.labels(route, "200")
        self.duration.labels("200")

    def exposition(
        self, workers: Mapping[str, Inspected | str], counters: Mapping[str, int], legs: Mapping[str, int]
    ) -> bytes:
        """Prometheus text format, UTF-8."""
        scrape = CollectorRegistry()
        scrape.register(_Scrape(workers, counters, legs))
        return generate_latest(self.registry) + generate_latest(scrape)


class Pace:
    """When the tokens of one request's answers came."""

    def __init__(self, metrics: FrontMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._answers: dict[int, tuple[float, float, int]] = {}  # index -> first, last, tokens after the first batch

    def took(self, index: int, tokens: int, now: float) -> None:
        if not tokens:
            return
        if not self._answers:
            self._metrics.first_token.observe(now - self._arrived)
        first, _, more = self._answers.get(index, (now, now, -tokens))
        self._answers[index] = (first, now, more + tokens)

    def end(self) -> None:
        """Every answer is whole."""
        for first, last, more in self._answers.values():
            if more:
                self._metrics.per_token.observe((last - first) / more)


class _Scrape(Collector):
    """What was asked of others for this one scrape."""

    def __init__(
        self, workers: Mapping[str, Inspected | str], counters: Mapping[str, int], legs: Mapping[str, int]
    ) -> None:
        self._workers, self._counters, self._legs = workers, counters, legs

    def collect(self) -> Iterable[Metric]:
        yield from _of_router(self._counters)
        legs = GaugeMetricFamily("quiesce:router_legs", "Legs a worker has not ended yet.", labels=["worker"])
        for name, count in sorted(self._legs.items()):
            legs.add_metric([name], count)
        yield legs
        up = GaugeMetricFamily("quiesce:worker_answers", "1: the worker answered this scrape.", labels=["worker"])
        families: dict[str, Metric] = {}
        for name, answer in sorted(self._workers.items()):
            up.add_metric([name], float(isinstance(answer, Inspected)))
            if isinstance(answer, Inspected):
                for sample in answer.samples:
                    _add(families, name, sample)
        yield up
        yield from families.values()


def _of_router(counters: Mapping[str, int]) -> Iterable[Metric]:
    """A name may have a kind behind a colon."""
    families: dict[str, CounterMetricFamily] = {}
    for each, value in sorted(counters.items()):
        name, _, kind = each.partition(":")
        text = f"Router: {name.replace('_', ' ')}."
        labels = ["kind"] if kind else []
        family = families.setdefault(name, CounterMetricFamily(f"quiesce:router_{name}", text, labels=labels))
        family.add_metric([kind] if kind else [], value)
    return families.values()


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
