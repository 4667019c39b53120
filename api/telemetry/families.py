"""Metric families with their values, as they are read at a scrape."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from indexer.recording.recorder import Recorder

Values: TypeAlias = float | Mapping[Any, float]


class Collected(Collector):
    """Families that a function reads at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the metric families."""
        return self._read()


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a counter. values: a number; with labels, their values -> number, the value of one label as str."""
    return _family(CounterMetricFamily, name, text, values, labels)


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a gauge. See `counter`."""
    return _family(GaugeMetricFamily, name, text, values, labels)


def without_workers(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield families whose samples are summed over workers and ranks. Of times, the longest remains."""
    for family in families:
        merged: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            labels = tuple(item for item in sample.labels.items() if item[0] not in ("worker", "dp_rank"))
            key, merge = (sample.name, labels), max if sample.name.endswith("_seconds") else operator.add
            merged[key] = merge(merged.get(key, 0.0), sample.value)
        family.samples = [Sample(name, dict(labels), value) for (name, labels), value in merged.items()]
        yield family


def recording_families(recorder: Recorder) -> Iterator[Metric]:
    """Yield the families of a recording beside the service."""
    yield counter("kvsight_recorded_records", "Records written", recorder.written)
    yield counter("kvsight_recording_lost", "Records not recorded", recorder.lost)
    yield gauge("kvsight_recording_degraded_seconds", "Time without writing, or 0", recorder.degraded_seconds)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, values: Values, labels: tuple[str, ...]
) -> Metric:
    if not isinstance(values, Mapping):
        return kind(name, text, value=values)
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family
