"""Metric families with their values, as they are read at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.recording.recorder import Recorder


class Collected(Collector):
    """Families that a function reads at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the metric families."""
        return self._read()


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def counter_by(label: str, name: str, text: str, counts: Mapping[str, int]) -> Metric:
    """Return a counter with one label. counts: its values -> counts."""
    return _by(CounterMetricFamily(name, text, labels=[label]), counts)


def gauge_by(label: str, name: str, text: str, values: Mapping[str, int]) -> Metric:
    """Return a gauge with one label."""
    return _by(GaugeMetricFamily(name, text, labels=[label]), values)


def recording_families(recorder: Recorder) -> Iterator[Metric]:
    """Yield the families of a recording beside the service."""
    yield counter("kvsight_recorded_records", "Records written", recorder.written)
    yield counter("kvsight_recording_lost", "Records not recorded", recorder.lost)
    yield gauge("kvsight_recording_degraded_seconds", "Time without writing, or 0", recorder.degraded_seconds)


def _by(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, int]) -> Metric:
    for value, number in values.items():
        family.add_metric([value], number)
    return family
