"""Metrics of a recording beside the service."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer.recording.recorder import Recorder


class RecordingMetrics(Collector):
    """Counts of the recorder, read at each scrape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        yield CounterMetricFamily("kvsight_recorded_records", "Records written", value=self._recorder.written)
        yield CounterMetricFamily("kvsight_recording_lost", "Records not recorded", value=self._recorder.lost)
        seconds = self._recorder.degraded_seconds
        yield GaugeMetricFamily("kvsight_recording_degraded_seconds", "Time without writing, or 0", value=seconds)
