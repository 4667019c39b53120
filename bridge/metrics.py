"""Prometheus metrics of the bridge, collected at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.context import BridgeCounters
from bridge.engine import EngineStatus
from bridge.stream.subscriber import ConnectionState
from publisher.metrics import LABELS, publisher_families, stream_labels

_DETAILS = {"bad_events": "reason", "unknown_media": "medium"}
"""Counters that have one more label."""


class BridgeMetrics(Collector):
    """Collects `kvsight_bridge_*`, one series for each rank of an engine, and the metrics of its publishers.

    Thread-safe.
    """

    def __init__(self, status: Callable[[], Sequence[EngineStatus]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        engines = self._status()
        yield from _gauges(engines)
        yield from _publishers(engines)
        for counter in fields(BridgeCounters):
            yield _counter(counter.name, engines)


def _counter(name: str, engines: Sequence[EngineStatus]) -> Metric:
    words, detail = name.replace("_", " "), _DETAILS.get(name)
    labels = LABELS if detail is None else (*LABELS, detail)
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
    links = GaugeMetricFamily("kvsight_bridge_link", "1 for the state of the connection", labels=[*LABELS, "state"])
    silent = GaugeMetricFamily("kvsight_bridge_silent_seconds", "Time since the last message", labels=LABELS)
    failed = GaugeMetricFamily("kvsight_bridge_failed", "1: its status names a failure", labels=LABELS)
    for engine in engines:
        for state in ConnectionState:
            links.add_metric([*_labels(engine), state.value], float(state is engine.state))
        silent.add_metric(_labels(engine), engine.silent_s)
        failed.add_metric(_labels(engine), float(engine.failure is not None))
    yield from (links, silent, failed)


def _publishers(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    streams = [status for engine in engines for status in engine.streams]
    pages = GaugeMetricFamily("kvsight_bridge_pages", "Distinct pages that a stream holds", labels=LABELS)
    for status in streams:
        pages.add_metric(stream_labels(status.stream), status.pages_held)
    yield pages
    yield from publisher_families((each.stream, each.publisher) for each in streams if each.publisher is not None)


def _labels(engine: EngineStatus) -> list[str]:
    """Labels of a rank. An address with self-named workers is its own worker label."""
    settings = engine.engine
    return [settings.worker or settings.endpoint, settings.model or "", settings.tenant, str(settings.dp_rank)]
