"""The recent history of the workers: rates as short curves, and changes of state. Bounded for each stream."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from api.page.lifetimes import PageLifetimes
from indexer.consumer import Consumer
from indexer.slices import Slices
from indexer.views import View
from indexer.worker_log import WorkerChange
from kv_events.codec import DecodedBatch
from kv_events.http.fleet import StateChange
from kv_events.runtime.supervised import in_background
from kv_events.streams import StreamId

INTERVAL_S: Final = 5.0
"""Length of the intervals over which rates are taken."""
NUM_INTERVALS: Final = 60

_MAX_CHANGES = 30
_SLICE_VIEWS = 256
_SLICE_S = 0.00025
_FOLLOWED_S = 600.0

Rates = npt.NDArray[np.float64]
"""[intervals, 2] pages stored and removed per second, oldest interval first."""


class CountedRates(NamedTuple):
    """The rates before a moment, which are counted from a log."""

    num_intervals: int
    """At most `NUM_INTERVALS`."""
    by_stream: dict[StreamId, Rates]
    """Streams with events."""


@dataclass(slots=True)
class _History:
    rates: Rates = field(default_factory=lambda: np.zeros((NUM_INTERVALS, 2)))  # a ring
    counts: tuple[int, int] | None = None
    """Pages stored and removed up to the last sample. None: not sampled yet."""
    peak_pages: int = 0
    changes: deque[StateChange] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))


class WorkerHistory:
    """Keeps the history of each stream that has a view. A stream takes about 4 KiB."""

    def __init__(self) -> None:
        self._histories: defaultdict[StreamId, _History] = defaultdict(_History)
        self._num_samples = 0
        self._sampled_at = 0.0
        self._on_applied: list[Callable[[View, DecodedBatch], None]] | None = None  # None: of the past
        self._lifetimes: PageLifetimes | None = None
        self._asked_at = 0.0

    @classmethod
    def of_past(cls, rates: CountedRates, changes: Mapping[StreamId, Iterable[StateChange]]) -> WorkerHistory:
        """Return the history as of a moment of the past. changes: oldest first."""
        watch = cls()
        watch._num_samples = rates.num_intervals
        for stream, each in rates.by_stream.items():
            watch._histories[stream].rates = each
        for stream, several in changes.items():
            watch._histories[stream].changes.extendleft(several)
        return watch

    @asynccontextmanager
    async def running(self, consumer: Consumer) -> AsyncIterator[None]:
        """Follow the views of a consumer in the background of a block."""

        def note(change: WorkerChange) -> None:
            if change.verb:
                event = StateChange(
                    time=time.time(), dp_rank=change.stream.dp_rank, event=change.verb, reason=change.reason
                )
                self._histories[change.stream].changes.appendleft(event)

        self._on_applied = consumer.applier.on_applied
        consumer.worker_log.on_change.append(note)
        async with in_background(self._sample_forever(consumer), "fleet-watch"):
            try:
                yield
            finally:
                consumer.worker_log.on_change.remove(note)

    def sample(self, views: list[View], now: float) -> Iterator[None]:
        """Take the rates since the last sample, in slices. Call it every `INTERVAL_S`. now: seconds of any clock.

        A stream that is new has the rate 0: it is not known when its pages were stored.
        """
        elapsed_s = max(0.001, now - self._sampled_at)
        row = self._num_samples % NUM_INTERVALS
        before = set(self._histories)
        for number, view in enumerate(views):
            history, counters = self._histories[view.stream], view.counters
            counts = counters.pages_stored, counters.pages_removed
            grown = [max(0, new - old) for new, old in zip(counts, history.counts or counts, strict=True)]
            history.rates[row] = [count / elapsed_s for count in grown]
            history.counts = counts
            history.peak_pages = max(history.peak_pages, sum(view.num_pages))
            if number % _SLICE_VIEWS == _SLICE_VIEWS - 1:
                yield
        self._num_samples += 1
        self._sampled_at = now
        known = {view.stream for view in views}
        for stream in before - known:
            del self._histories[stream]
        if self._lifetimes is not None:
            yield from self._lifetimes.keep(known)

    def rates(self, stream: StreamId) -> Rates:
        """Return the rates of a stream. They are shorter while fewer intervals have passed."""
        number = min(self._num_samples, NUM_INTERVALS)
        order = np.arange(self._num_samples - number, self._num_samples) % NUM_INTERVALS
        return self._known(stream).rates[order]

    def median_lifetime_s(self, streams: Iterable[StreamId]) -> float | None:
        """Return the seconds for which half of the pages that ranks removed were held at most. None: not known.

        Pages are followed from the first call on, until nobody has called for ten minutes: it costs microseconds a
        batch.
        """
        self._asked_at = time.monotonic()
        if self._lifetimes is None and self._on_applied is not None:
            self._lifetimes = PageLifetimes()
            self._on_applied.append(self._lifetimes.note)
        return None if self._lifetimes is None else self._lifetimes.median_s(streams)

    def peak_pages(self, stream: StreamId) -> int:
        """Return the most pages that the stream held at any sample."""
        return self._known(stream).peak_pages

    def changes(self, stream: StreamId) -> list[StateChange]:
        """Return the newest changes of a stream, newest first."""
        return list(self._known(stream).changes)

    def _known(self, stream: StreamId) -> _History:
        return self._histories.get(stream) or _History()

    async def _sample_forever(self, consumer: Consumer) -> None:
        slices = Slices(_SLICE_S)
        while True:
            if not consumer.why_not_ready():  # before, counts grow by what a snapshot or the log has from earlier
                await slices.run(self.sample(consumer.namespaces.views, time.monotonic()))
            if self._lifetimes is not None and time.monotonic() - self._asked_at > _FOLLOWED_S:
                consumer.applier.on_applied.remove(self._lifetimes.note)
                self._lifetimes = None
            await asyncio.sleep(INTERVAL_S)
