"""Metrics in Prometheus' text format. They are counted in a middleware or read from the views at each scrape.

The number of those of workers is bounded.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from api.access.rate_limits import TenantRates
from api.telemetry.families import Collected, counter, gauge
from api.view_source import Capacity, ViewSource
from indexer.consumer import Consumer
from indexer.views import View, ViewCounters, ViewState, least_trusted
from indexer.writing.queue import WriteQueue
from kv_events.schema import MEDIA
from kv_events.streams import StreamId
from selection.exchange import ReservationExchange

COUNTER_NAMES = tuple(f.name for f in fields(ViewCounters))
WORKER_COUNTERS = ("pages_stored", "pages_removed", "resyncs", "digest_mismatches")
_COLUMNS = [COUNTER_NAMES.index(name) for name in WORKER_COUNTERS]
_counts = attrgetter(*COUNTER_NAMES)
_NO_COUNTS = (0,) * len(COUNTER_NAMES)
_LABELS = ("model", "tenant", "worker")

Counts = NDArray[np.int64]


WorkerLabels: TypeAlias = tuple[str, str, str]
"""Model, tenant and name of a worker. Group streams of hybrid models have a model of their own."""
OTHER: WorkerLabels = "other", "other", "other"
"""Labels of all workers beyond the limit."""


_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)
_SLICE_SAMPLES = 500
_MAX_TENANTS = 200
"""Tenants with labels of their own. All further ones share the label `other`."""
_STREAM_COUNTERS = {
    name: "kvsight_batches_applied" if name == "batches" else f"kvsight_{name}" for name in COUNTER_NAMES
}


class HttpMetrics:
    """Metrics of one application, in their own registry."""

    def __init__(self, consumer: Consumer, timed_paths: Collection[str], max_workers: int, capacity: Capacity) -> None:
        """max_workers, capacity: see `ViewMetrics`."""
        self.registry = CollectorRegistry()
        self.add(lambda: consumer_families(consumer))
        self.registry.register(ViewMetrics(consumer, max_workers, capacity))
        self.queries = QueryMetrics(timed_paths)
        self.registry.register(self.queries)
        self.errors = PrometheusCounter(
            "kvsight_http_errors", "Answers of status 4xx and 5xx", ["status_class"], registry=self.registry
        )

    def add(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Add families that a function reads at each scrape."""
        self.registry.register(Collected(read))


async def metrics_text(registry: Collector) -> bytes:
    """Return metrics in text format 0.0.4. Other tasks can run between two slices of it."""
    parts = []
    for family in registry.collect():
        for start in range(0, len(family.samples) or 1, _SLICE_SAMPLES):
            part = Metric(family.name, family.documentation, family.type)
            part.samples = family.samples[start : start + _SLICE_SAMPLES]
            text = generate_latest(Collected(lambda part=part: [part]))  # type: ignore[misc]
            parts.append(text if start == 0 else text.split(b"\n", 2)[2])  # one header for each family
            await asyncio.sleep(0)
    return b"".join(parts)


class QueryMetrics(Collector):
    """Number and times of queries by route. A note takes a third of the time that a histogram with a lock takes."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = frozenset(paths)
        self._counts = {path: [0] * (len(_BUCKETS_S) + 1) for path in paths}
        self._seconds = dict.fromkeys(paths, 0.0)

    def note(self, path: str, seconds: float, count: int = 1) -> None:
        """Count queries that took the same time, each `seconds`. path: one of `paths`.

        The event loop's thread calls it.
        """
        self._counts[path][bisect_left(_BUCKETS_S, seconds)] += count
        self._seconds[path] += count * seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        queries = CounterMetricFamily("kvsight_queries", "Queries answered", labels=["route"])
        times = HistogramMetricFamily("kvsight_query_seconds", "Time of a query", labels=["route"])
        bounds = [*map(floatToGoString, _BUCKETS_S), "+Inf"]
        for path, counts in self._counts.items():
            queries.add_metric([path], sum(counts))
            times.add_metric([path], list(zip(bounds, accumulate(counts), strict=True)), self._seconds[path])
        yield from (queries, times)


def consumer_families(consumer: Consumer) -> Iterator[Metric]:
    """Yield the families of the consumer."""
    yield counter("kvsight_resync_requests", "Resyncs requested", consumer.resyncs.requested, "reason")
    yield counter("kvsight_snapshots_written", "Snapshots written", consumer.snapshot_counts.written)
    failures = consumer.snapshot_counts.failures
    yield counter("kvsight_snapshot_failures", "Snapshots that could not be written", failures)
    is_ready = not consumer.why_not_ready()
    yield gauge("kvsight_ready", "1 after the service has caught up with the log", float(is_ready))
    yield gauge("kvsight_log_up", "1 while the log can be read", float(consumer.log_outage.since is None))
    yield gauge("kvsight_log_down_seconds", "Time since the log became unreadable", consumer.log_outage.seconds)
    if (lag := consumer.lag()) is not None:
        yield gauge("kvsight_log_lag_records", "Records in the log that are not applied yet", lag)


def queue_families(log: WriteQueue) -> Iterator[Metric]:
    """Yield the families of a queue of decisions or reservations."""
    name = log.contents.name
    dropped = {reason.replace(" ", "_"): count for reason, count in log.dropped.items()}
    yield counter(f"kvsight_{name}", f"Records of {name} accepted", log.accepted, "kind")
    yield counter(f"kvsight_{name}_dropped", f"Records of {name} dropped", dropped, "reason")
    yield counter(f"kvsight_{name}_written", f"Records of {name} written", log.written)
    yield gauge(f"kvsight_{name}_queued", f"Records of {name} that wait to be written", log.num_queued)


def reservation_families(exchange: ReservationExchange) -> Iterator[Metric]:
    """Yield the families of the book, and of its exchange with other replicas."""
    yield from queue_families(exchange.queue)
    yield gauge("kvsight_reservations_booked", "Requests that are reserved now", len(exchange.book))
    yield counter("kvsight_reservations_expired", "Reservations that expired", exchange.book.num_expired)
    yield counter("kvsight_reservations_applied", "Records of other replicas applied", exchange.applied)
    yield counter("kvsight_reservations_rejected", "Records not applied", exchange.rejected, "reason")


def tenant_families(served: ViewSource, rates: TenantRates) -> Iterator[Metric]:
    """Yield what each tenant uses and what was refused. Those with a table in the file of limits come first."""
    namespaces = served.namespaces
    refused = Counter(stream.tenant for stream in namespaces.refused)
    known = dict.fromkeys([*rates.limits.named, *namespaces.tenants, *refused, *rates.refused])
    streams, pages, refusals, queries = (Counter[str]() for _ in range(4))
    for number, tenant in enumerate(known):
        label = tenant if number < _MAX_TENANTS else "other"
        streams[label] += namespaces.num_streams(tenant)
        pages[label] += namespaces.num_pages(tenant)
        refusals[label] += refused[tenant]
        queries[label] += rates.refused[tenant]
    yield gauge("kvsight_tenant_worker_streams", "Worker streams that have a view", streams, "tenant")
    yield gauge("kvsight_tenant_pages", "Distinct pages, over all namespaces", pages, "tenant")
    yield gauge("kvsight_tenant_refused_streams", "Worker streams beyond the limit", refusals, "tenant")
    yield counter("kvsight_tenant_refused_queries", "Queries beyond the limit", queries, "tenant")


class ViewMetrics(Collector):
    """Metrics of the views, read at each scrape. Workers beyond a limit share one set of series."""

    def __init__(self, served: ViewSource, max_workers: int, capacity: Capacity) -> None:
        """max_workers: workers that have series of their own. capacity: returns the room of a rank."""
        self._served = served
        self._max_workers = max_workers
        self._capacity = capacity
        self._last: dict[StreamId, tuple[int, ...]] = {}  # counters at the last scrape
        self._totals = np.zeros(len(COUNTER_NAMES), np.int64)
        self._of_workers: dict[WorkerLabels, Counts] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        views = self._served.namespaces.views
        growth = self._growth(views)
        yield from self._record_families()
        yield from self._stream_counters(growth)
        yield from self._worker_families(views, growth)
        yield from self._view_families()
        yield from self._index_families()

    def _growth(self, views: Sequence[View]) -> Counts:
        """Return how much the counters have grown since the last scrape, int64[len(views), len(COUNTER_NAMES)].

        It is never negative: a stream whose counters fell was forgotten and has come back, and all its counts are
        growth.
        """
        now = {view.stream: _counts(view.counters) for view in views}
        shape = (len(now), len(COUNTER_NAMES))
        counts = np.array(list(now.values()), np.int64).reshape(shape)
        growth: Counts = counts - np.array([self._last.get(each, _NO_COUNTS) for each in now], np.int64).reshape(shape)
        is_new = (growth < 0).any(axis=1)
        growth[is_new] = counts[is_new]
        self._last = now
        return growth

    def _record_families(self) -> Iterator[Metric]:
        yield counter("kvsight_records", "Records read from the log", self._served.applier.records)
        yield counter("kvsight_records_rejected", "Dead letters", self._served.applier.dead_letters.counts, "reason")

    def _stream_counters(self, growth: Counts) -> Iterator[Metric]:
        """Yield sums over all streams, which never decrease."""
        self._totals += growth.sum(axis=0)
        for (name, metric), total in zip(_STREAM_COUNTERS.items(), self._totals.tolist(), strict=True):
            yield counter(metric, f"{name.replace('_', ' ')}, all streams".capitalize(), total)

    def _worker_families(self, views: Sequence[View], growth: Counts) -> Iterator[Metric]:
        """Yield sums over the ranks of each worker. A worker keeps its series as long as it has a view."""
        served, now = self._served, self._served.now()
        workers = [view.stream[:3] for view in views]
        self._choose(dict.fromkeys(workers))
        held = {labels: [0] * len(MEDIA) for labels in self._of_workers}
        found: dict[WorkerLabels, dict[WorkerLabels, ViewState]] = {labels: {} for labels in self._of_workers}
        ages: dict[WorkerLabels, float] = {}
        rooms: Counter[tuple[str, ...]] = Counter()
        for view, worker, grown in zip(views, workers, growth[:, _COLUMNS], strict=True):
            labels = worker if worker in self._of_workers else OTHER
            self._of_workers[labels] += grown
            held[labels] = [sum(pair) for pair in zip(held[labels], view.num_pages, strict=True)]
            ages[labels] = max(ages.get(labels, 0.0), now - view.last_batch_at)
            for medium, number in self._capacity(view.stream, view.block_size).items():
                rooms[*labels, medium] += number
            state, of_ranks = served.freshness.state(view), found[labels]
            of_ranks[worker] = least_trusted((of_ranks.get(worker, state), state))
        pages, states = {}, {}
        for labels in self._of_workers:
            for tier, number in zip(MEDIA, held[labels], strict=True):
                pages[*labels, tier.value] = number
            for state in ViewState:
                states[*labels, state.value] = [*found[labels].values()].count(state)
        yield gauge("kvsight_worker_pages", "Pages that a worker holds", pages, *_LABELS, "medium")
        text = "Pages for which a worker has room, where it is known"
        yield gauge("kvsight_worker_capacity_pages", text, rooms, *_LABELS, "medium")
        text = "Workers in a state: 1 for the state of a worker"
        yield gauge("kvsight_worker_state", text, states, *_LABELS, "state")
        yield gauge("kvsight_worker_view_age_seconds", "Time since the worker was last heard", ages, *_LABELS)
        for column, name in enumerate(WORKER_COUNTERS):
            text = f"{name.replace('_', ' ').capitalize()}, by worker"
            counts = {labels: int(each[column]) for labels, each in self._of_workers.items()}
            yield counter(f"kvsight_worker_{name}", text, counts, *_LABELS)

    def _choose(self, workers: Mapping[WorkerLabels, None]) -> None:
        """Drop the series of forgotten workers, and give series to new ones. `OTHER` stays once it was needed."""
        for gone in self._of_workers.keys() - workers.keys() - {OTHER}:
            del self._of_workers[gone]
        room = self._max_workers - len(self._of_workers.keys() - {OTHER})
        for worker in workers.keys() - self._of_workers.keys():
            self._of_workers.setdefault(worker if room > 0 else OTHER, np.zeros(len(_COLUMNS), np.int64))
            room -= 1

    def _view_families(self) -> Iterator[Metric]:
        served = self._served
        by_state: Counter[ViewState] = Counter()
        last_batch_at = []
        for view in served.namespaces.views:
            state = served.freshness.state(view)
            by_state[state] += 1
            if state is not ViewState.EXPIRED:
                last_batch_at.append(view.last_batch_at)
        yield gauge("kvsight_workers", "Worker streams", {state.value: by_state[state] for state in ViewState}, "state")
        now = served.now()
        oldest = max(0.0, now - min(last_batch_at, default=now))
        yield gauge("kvsight_view_age_seconds", "Age of the oldest view that counts in scores", oldest)

    def _index_families(self) -> Iterator[Metric]:
        labels = "model", "tenant", "block_size"
        namespaces = {tuple(map(str, namespace.key)): namespace for namespace in self._served.namespaces}
        pages = {}
        for key, namespace in namespaces.items():
            held = [view.num_pages for view in namespace.views.values()]
            for tier, medium in enumerate(MEDIA):
                pages[*key, medium.value] = sum(counts[tier] for counts in held)
        yield gauge("kvsight_pages", "Pages held, summed over workers", pages, *labels, "medium")
        for name, text, attribute in (
            ("kvsight_index_pages", "Distinct pages", "num_pages"),
            ("kvsight_index_holder_sets", "Distinct holder sets", "num_sets"),
            ("kvsight_index_bytes", "Bytes of the arrays in use", "bytes_used"),
        ):
            yield gauge(name, text, {key: getattr(each.index, attribute) for key, each in namespaces.items()}, *labels)
