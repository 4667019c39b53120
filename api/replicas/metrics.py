"""GET /metrics over all processes of a service, whichever of them answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Set
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from api.metrics import LOG_COUNTERS, READ_COUNTERS, metrics_text
from api.replicas.asking import Siblings
from api.replicas.replica import Replica
from kv_events.rate_limited_logger import RateLimitedLogger

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
"""Where a process tells the others its own metrics, as msgpack."""
_OF_EACH = frozenset({"kvsight_ready", "kvsight_log_up", "kvsight_log_down_seconds", "kvsight_log_lag_records"})
"""Gauges that each process has for itself, with the label `process`."""
_ADDED_GAUGES = frozenset({"kvsight_event_clients", "kvsight_decisions_queued"})
_TIMEOUT_S: Final = 5.0
_CUMULATIVE = frozenset({"counter", "histogram"})


class Family(msgspec.Struct, array_like=True):
    """A metric family of one process."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]
    """Name, labels, value."""


_encoder = msgspec.msgpack.Encoder()
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_family = msgspec.msgpack.Decoder(Family)


class SharedMetrics:
    """The metrics of one process, and of all.

    Counts of what processes did are added up. The views and the log are the same for all, so of their figures the
    largest is shown. What an ended process has counted stays: each process keeps its counts in a file whenever it
    reports them, and the process that replaces it goes on from there. So no sum decreases.
    """

    def __init__(self, replica: Replica, registry: CollectorRegistry, siblings: Siblings) -> None:
        self._replica = replica
        self._registry = registry
        self._siblings = siblings
        self._limited_logger = RateLimitedLogger(logger, "metrics")
        self._before = self._kept_by(replica.number)

    async def text(self) -> bytes:
        """Return the metrics of all processes in text format 0.0.4."""
        others = self._replica.others()
        answers = await asyncio.gather(*(self._siblings.get(number, PATH, _TIMEOUT_S) for number in others))
        merged = _Merged(LOG_COUNTERS)
        up = GaugeMetricFamily("kvsight_process_up", "1 for a process that answers", labels=["process"])
        found = {n: None if a is None or a.is_error else a.content for n, a in zip(others, answers, strict=True)}
        found[self._replica.number] = await self.own()
        for number, data in sorted(found.items()):
            up.add_metric([str(number)], float(data is not None))
            async for family in _families(self._kept_by(number) if data is None else data):
                merged.add(family, number)
        return await metrics_text(_Collected([*merged.metrics(), up]))

    async def own(self) -> bytes:
        """Return the families of this process and of those that it replaced, as msgpack."""
        merged = _Merged(LOG_COUNTERS - READ_COUNTERS)  # the counts of views are in the snapshot
        async for family in _families(self._before):
            merged.add(family)
        for metric in self._registry.collect():
            samples = [(sample.name, sample.labels, sample.value) for sample in metric.samples]
            merged.add(Family(metric.name, metric.documentation, metric.type, samples))
            await asyncio.sleep(0)
        families = list(merged.families())
        parts = []
        for each in families:
            parts.append(msgspec.Raw(_encoder.encode(each)))
            await asyncio.sleep(0)
        kept = [part for part, each in zip(parts, families, strict=True) if each.kind in _CUMULATIVE]
        self._keep(_encoder.encode(kept))
        return _encoder.encode(parts)

    def _keep(self, data: bytes) -> None:
        path = self._replica.counts_of(self._replica.number)
        new = path.with_suffix(".new")
        try:
            new.write_bytes(data)
            new.replace(path)
        except OSError as error:
            self._limited_logger.warning("the counts of this process are lost if it ends: %s", error)

    def _kept_by(self, number: int) -> bytes:
        """Return what a process has counted, as of the last report."""
        try:
            return self._replica.counts_of(number).read_bytes()
        except OSError:
            return _encoder.encode([])


class _Merged:
    """Families of several processes, as one of each name."""

    def __init__(self, same: Set[str]) -> None:
        """same: counters that are the same in all, so that the largest is taken. The others are added up."""
        self._same = same
        self._families: dict[str, tuple[Family, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}

    def add(self, family: Family, number: int | None = None) -> None:
        """Add the family of a process. number: for the label of gauges that each process has."""
        _, values = self._families.setdefault(family.name, (family, {}))
        is_of_each = number is not None and family.name in _OF_EACH
        adds_up = self._adds_up(family)
        for name, labels, value in family.samples:
            own = {"process": str(number), **labels} if is_of_each else labels
            key = name, tuple(own.items())
            if key not in values:
                values[key] = value
            elif name.endswith("_created"):
                values[key] = min(value, values[key])
            else:
                values[key] = values[key] + value if adds_up else max(values[key], value)

    def _adds_up(self, family: Family) -> bool:
        return family.name in _ADDED_GAUGES or (family.kind in _CUMULATIVE and family.name not in self._same)

    def families(self) -> Iterator[Family]:
        """Yield the families in the order of their first appearance."""
        for family, values in self._families.values():
            samples = [(name, dict(labels), value) for (name, labels), value in values.items()]
            yield Family(family.name, family.text, family.kind, samples)

    def metrics(self) -> Iterator[Metric]:
        """Yield the families as metrics."""
        for family in self.families():
            metric = Metric(family.name, family.text, family.kind)
            metric.samples = [Sample(*sample) for sample in family.samples]
            yield metric


async def _families(data: bytes) -> AsyncIterator[Family]:
    """Decode families. Queries can run between two of them."""
    for part in _parts.decode(data):
        yield _family.decode(part)
        await asyncio.sleep(0)


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
