"""Prometheus metrics of the bridge, collected at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.counters import BridgeCounters
from bridge.engine import EngineStatus
from bridge.stream.subscriber import ConnectionState

_LABELS = ("worker", "model", "tenant", "dp_rank")
_DETAILS = {"bad_events": "reason", "unknown_media": "medium"}
"""Counters that have one more label."""


class BridgeMetrics(Collector):
    """Collects `kvsight_bridge_*`, one series for each rank of an engine. Thread-safe."""

    def __init__(self, status: Callable[[], Sequence[EngineStatus]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        engines = self._status()
        yield from _gauges(engines)
        yield from _publishers(engines)
        for counter in fields(BridgeCounters):
            yield _counter(counter.name, engines)


def _counter(name: str, engines: Sequence[EngineStatus]) -> Metric:
    words, detail = name.replace("_", " "), _DETAILS.get(name)
    labels = _LABELS if detail is None else (*_LABELS, detail)
    family = CounterMetricFamily(f"kvsight_bridge_{name}", words, labels=labels)
    for engine in engines:
        value: int | Counter[str] = getattr(engine.counters, name)
        if isinstance(value, int):
            family.add_metric(_labels(engine), value)
        else:
            for label, number in value.items():
                family.add_metric([*_labels(engine), label], number)
    return family


def _gauges(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    links = GaugeMetricFamily("kvsight_bridge_link", "1 for the state of the connection", labels=[*_LABELS, "state"])
    silent = GaugeMetricFamily("kvsight_bridge_silent_seconds", "Time since the last message", labels=_LABELS)
    failed = GaugeMetricFamily("kvsight_bridge_failed", "1: its status names a failure", labels=_LABELS)
    for engine in engines:
        for state in ConnectionState:
            links.add_metric([*_labels(engine), state.value], float(state is engine.state))
        silent.add_metric(_labels(engine), engine.silent_s)
        failed.add_metric(_labels(engine), float(engine.failure is not None))
    yield from (links, silent, failed)


def _publishers(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    pages = GaugeMetricFamily("kvsight_bridge_pages", "Distinct pages that a stream holds", labels=_LABELS)
    queued = GaugeMetricFamily(
        "kvsight_bridge_queued_pages", "Page changes that the sink has not confirmed yet", labels=_LABELS
    )
    reach = GaugeMetricFamily("kvsight_bridge_sink_available", "1: the sink takes records", labels=_LABELS)
    refused = CounterMetricFamily("kvsight_bridge_rejected_records", "Records that the sink refused", labels=_LABELS)
    skipped = CounterMetricFamily(
        "kvsight_bridge_skipped_requests", "Messages of the control topic that are no requests", labels=_LABELS
    )
    for status in (stream for engine in engines for stream in engine.streams):
        model, tenant, worker, rank = status.stream
        labels = [worker, model, tenant, str(rank)]
        pages.add_metric(labels, status.pages_held)
        if status.publisher is not None:
            queue = status.publisher.queue
            queued.add_metric(labels, queue.queued + queue.in_flight)
            reach.add_metric(labels, float(status.publisher.is_sink_available))
            refused.add_metric(labels, status.publisher.rejected_records)
            skipped.add_metric(labels, status.publisher.skipped_requests)
    yield from (pages, queued, reach, refused, skipped)


def _labels(engine: EngineStatus) -> list[str]:
    """Labels of a rank. An address with self-named workers is its own worker label."""
    settings = engine.engine
    return [settings.worker or settings.endpoint, settings.model or "", settings.tenant, str(settings.dp_rank)]
