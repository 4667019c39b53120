"""Metrics of each worker. Their number is bounded: workers beyond a limit share one set of series."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from api.telemetry.families import counter, gauge
from indexer.freshness import Freshness
from indexer.views import View, ViewCounters, ViewState, least_trusted
from kv_events.schema import MEDIA
from kv_events.streams import StreamId

COUNTER_NAMES = tuple(f.name for f in fields(ViewCounters))
WORKER_COUNTERS = ("pages_stored", "pages_removed", "resyncs", "digest_mismatches")
_COLUMNS = [COUNTER_NAMES.index(name) for name in WORKER_COUNTERS]
_counts = attrgetter(*COUNTER_NAMES)
_NO_COUNTS = (0,) * len(COUNTER_NAMES)
_LABELS = ("model", "tenant", "worker")

Counts = NDArray[np.int64]


class WorkerLabels(NamedTuple):
    """Labels of a worker's series. Group streams of hybrid models have a model label of their own."""

    model: str
    tenant: str
    worker: str


OTHER = WorkerLabels("other", "other", "other")
"""Labels of all workers beyond the limit."""


class CounterGrowth:
    """How much the counters of views have grown from one scrape to the next."""

    def __init__(self) -> None:
        self._last: dict[StreamId, tuple[int, ...]] = {}

    def take(self, views: Sequence[View]) -> Counts:
        """Return int64[len(views), len(COUNTER_NAMES)], never negative.

        A stream whose counters fell was forgotten and has come back: all its counts are growth.
        """
        now = {view.stream: _counts(view.counters) for view in views}
        shape = (len(now), len(COUNTER_NAMES))
        counts = np.array(list(now.values()), np.int64).reshape(shape)
        growth: Counts = counts - np.array([self._last.get(each, _NO_COUNTS) for each in now], np.int64).reshape(shape)
        is_new = (growth < 0).any(axis=1)
        growth[is_new] = counts[is_new]
        self._last = now
        return growth


@dataclass(slots=True)
class _Figures:
    """What one set of series shows at this scrape."""

    pages: list[int] = field(default_factory=lambda: [0] * len(MEDIA))
    states: dict[WorkerLabels, ViewState] = field(default_factory=dict)
    """The least trusted state of each worker's ranks."""
    last_batch_at: float = float("inf")
    """The earliest among the ranks."""


class WorkerMetrics:
    """Sums over the ranks of each worker. A worker keeps its series as long as it has a view."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._counters: dict[WorkerLabels, Counts] = {}
        self._figures: dict[WorkerLabels, _Figures] = {}

    def update(self, views: Sequence[View], growth: Counts, freshness: Freshness) -> None:
        """Read the views. growth: the growth of their counters since the last update."""
        workers = [WorkerLabels(*view.stream[:3]) for view in views]
        self._choose(dict.fromkeys(workers))
        self._figures = {labels: _Figures() for labels in self._counters}
        for view, worker, grown in zip(views, workers, growth[:, _COLUMNS], strict=True):
            labels = worker if worker in self._counters else OTHER
            self._counters[labels] += grown
            figures = self._figures[labels]
            figures.pages = [sum(pair) for pair in zip(figures.pages, view.num_pages, strict=True)]
            figures.last_batch_at = min(figures.last_batch_at, view.last_batch_at)
            state = freshness.state(view)
            figures.states[worker] = least_trusted((figures.states.get(worker, state), state))

    def _choose(self, workers: Mapping[WorkerLabels, None]) -> None:
        """Drop the series of forgotten workers, and give series to new ones. `OTHER` stays once it was needed."""
        for gone in self._counters.keys() - workers.keys() - {OTHER}:
            del self._counters[gone]
        room = self._max_workers - len(self._counters.keys() - {OTHER})
        for worker in workers.keys() - self._counters.keys():
            self._counters.setdefault(worker if room > 0 else OTHER, np.zeros(len(_COLUMNS), np.int64))
            room -= 1

    def families(self, now: float) -> Iterator[Metric]:
        """Yield the metric families of the last update. now: seconds since 1970."""
        pages, states, ages = {}, {}, {}
        for labels, each in self._figures.items():
            for medium, number in zip(MEDIA, each.pages, strict=True):
                pages[*labels, medium.value] = number
            found = list(each.states.values())
            for state in ViewState:
                states[*labels, state.value] = found.count(state)
            if found:
                ages[labels] = max(0.0, now - each.last_batch_at)
        yield gauge("kvsight_worker_pages", "Pages that a worker holds", pages, *_LABELS, "medium")
        text = "Workers in a state: 1 for the state of a worker"
        yield gauge("kvsight_worker_state", text, states, *_LABELS, "state")
        yield gauge("kvsight_worker_view_age_seconds", "Time since the worker was last heard", ages, *_LABELS)
        for column, name in enumerate(WORKER_COUNTERS):
            text = f"{name.replace('_', ' ').capitalize()}, by worker"
            counts = {labels: int(each[column]) for labels, each in self._counters.items()}
            yield counter(f"kvsight_worker_{name}", text, counts, *_LABELS)


def capacity_families(
    views: Sequence[View], capacity: Callable[[StreamId, int], Mapping[str, int]], max_workers: int
) -> Iterator[Metric]:
    """Yield the room of each worker, summed over its ranks. Workers beyond `max_workers` share the labels `other`.

    capacity: stream and tokens per page -> medium -> pages.
    """
    sums: dict[tuple[str, ...], int] = {}
    known: set[WorkerLabels] = set()
    for view in views:
        if pages := capacity(view.stream, view.block_size):
            labels = WorkerLabels(*view.stream[:3])
            if labels in known or len(known) < max_workers:
                known.add(labels)
            else:
                labels = OTHER
            for medium, number in pages.items():
                sums[*labels, medium] = sums.get((*labels, medium), 0) + number
    text = "Pages for which a worker has room, where it is known"
    yield gauge("kvsight_worker_capacity_pages", text, sums, *_LABELS, "medium")
