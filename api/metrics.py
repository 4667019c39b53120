"""Metrics in Prometheus' text format. They are counted in a middleware or read from the views at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import Histogram
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.feed import EventFeed
from indexer.consumer import Consumer
from indexer.views import ViewCounters, ViewState
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)
_STREAM_COUNTERS = tuple(f.name for f in fields(ViewCounters))


class HttpMetrics:
    """Metrics of one application, in their own registry."""

    def __init__(self, consumer: Consumer, timed_paths: Collection[str], feed: EventFeed) -> None:
        self.registry = CollectorRegistry()
        listening = Gauge("kvsight_event_clients", "Callers of GET /events", registry=self.registry)
        listening.set_function(lambda: feed.num_clients)
        self.registry.register(ConsumerMetrics(consumer))
        queries = PrometheusCounter("kvsight_queries", "Queries answered", ["route"], registry=self.registry)
        seconds = Histogram(
            "kvsight_query_seconds", "Time of a query", ["route"], buckets=_BUCKETS_S, registry=self.registry
        )
        self.errors = PrometheusCounter(
            "kvsight_http_errors", "Answers of status 4xx and 5xx", ["status_class"], registry=self.registry
        )
        self.timed = {path: (queries.labels(path), seconds.labels(path)) for path in timed_paths}

    def text(self) -> bytes:
        """Return the metrics in text format 0.0.4."""
        return generate_latest(self.registry)


class MeasureRequests:
    """Middleware that times the query routes and counts errors."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.errors.labels(f"{message['status'] // 100}xx").inc()
            await send(message)

        began = time.perf_counter()
        await self._app(scope, receive, send_and_count)
        if (timed := self._metrics.timed.get(scope["path"])) is not None:
            queries, seconds = timed
            queries.inc()
            seconds.observe(time.perf_counter() - began)


class ConsumerMetrics(Collector):
    """Metrics of the views and the consumer, read at each scrape."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._seen: dict[StreamId, Counter[str]] = {}
        self._totals: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        yield from self._consumer_families()
        yield from self._stream_counters()
        yield from self._view_families()
        yield from self._index_families()

    def _consumer_families(self) -> Iterator[Metric]:
        consumer = self._consumer
        yield _counter("kvsight_records", "Records read from the log", consumer.applier.records)
        yield _counter("kvsight_resync_requests", "Resyncs requested", consumer.resyncs_requested)
        yield _counter("kvsight_snapshots_written", "Snapshots written", consumer.snapshots_written)
        yield _counter("kvsight_snapshot_failures", "Snapshots that could not be written", consumer.snapshot_failures)
        yield _gauge("kvsight_ready", "1 after the service has caught up with the log", float(consumer.ready))
        if (lag := consumer.lag()) is not None:
            yield _gauge("kvsight_log_lag_records", "Records in the log that are not applied yet", lag)
        rejected = CounterMetricFamily("kvsight_records_rejected", "Dead letters", labels=["reason"])
        for reason, count in consumer.applier.dead_letters.counts.items():
            rejected.add_metric([reason], count)
        yield rejected

    def _stream_counters(self) -> Iterator[Metric]:
        """Yield sums over all streams. They never decrease, even if a stream is forgotten with its counters."""
        seen = {}
        for view in self._consumer.namespaces.views:
            now = Counter({name: getattr(view.counters, name) for name in _STREAM_COUNTERS})
            before = self._seen.get(view.stream, Counter())
            has_restarted = any(now[name] < before[name] for name in _STREAM_COUNTERS)
            self._totals.update(now if has_restarted else now - before)
            seen[view.stream] = now
        self._seen = seen
        for name in _STREAM_COUNTERS:
            metric = "kvsight_batches_applied" if name == "batches" else f"kvsight_{name}"
            yield _counter(metric, f"{name.replace('_', ' ')}, all streams".capitalize(), self._totals[name])

    def _view_families(self) -> Iterator[Metric]:
        consumer = self._consumer
        by_state: Counter[ViewState] = Counter()
        heard_at = []
        for view in consumer.namespaces.views:
            state = consumer.freshness.state(view)
            by_state[state] += 1
            if state is not ViewState.EXPIRED:
                heard_at.append(view.heard_at)
        workers = GaugeMetricFamily("kvsight_workers", "Worker streams", labels=["state"])
        for state in ViewState:
            workers.add_metric([state.value], by_state[state])
        yield workers
        now = time.time()
        oldest = max(0.0, now - min(heard_at, default=now))
        yield _gauge("kvsight_view_age_seconds", "Age of the oldest view that counts in scores", oldest)

    def _index_families(self) -> Iterator[Metric]:
        labels = ["model", "tenant", "block_size"]
        pages = GaugeMetricFamily("kvsight_pages", "Pages held, summed over workers", labels=[*labels, "medium"])
        distinct = GaugeMetricFamily("kvsight_index_pages", "Distinct pages", labels=labels)
        sets = GaugeMetricFamily("kvsight_index_holder_sets", "Distinct holder sets", labels=labels)
        size = GaugeMetricFamily("kvsight_index_bytes", "Bytes of the arrays in use", labels=labels)
        for namespace in self._consumer.namespaces:
            key = [str(part) for part in namespace.key]
            held = [view.num_pages for view in namespace.views.values()]
            for tier, medium in enumerate(MEDIA):
                pages.add_metric([*key, medium.value], sum(counts[tier] for counts in held))
            distinct.add_metric(key, namespace.index.num_pages)
            sets.add_metric(key, namespace.index.num_sets)
            size.add_metric(key, namespace.index.bytes_used)
        yield from (pages, distinct, sets, size)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)
