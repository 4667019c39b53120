"""The recent history of the workers: rates as short curves, and changes of state. Bounded for each stream.

Also how long pages stay on the device of each rank, by the index of `kvsight audit`. It follows one page in 256.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from analysis.audit.residency import BatchTime, ResidencyIndex, median_lifetime, milliseconds
from analysis.kernels.residency import NUM_LIFETIMES
from indexer.consumer import Consumer
from indexer.slices import Slices
from indexer.views import View
from indexer.worker_log import WorkerChange
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages
from kv_events.hashing import U64Array
from kv_events.http.fleet import StateChange
from kv_events.runtime.supervised import in_background
from kv_events.schema import AllBlocksCleared, SnapshotBegin
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

_MASK = np.uint64(255)
"""Pages whose hash has none of these bits are followed."""
_CAPACITY = 2**16
_MOST_COUNTED = 1024
"""Removed pages of a rank, after which earlier ones count half."""
_MAX_NUMBER = 2**16
_DEVICE = 0


@dataclass(slots=True)
class _Rank:
    number: int
    """In the index."""
    removed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_LIFETIMES, np.int64))
    """[NUM_LIFETIMES] removed pages by the time that they were held."""
    mark: int = 0
    is_resync: bool = False
    """Whether pages are named that were stored before, nobody knows when."""


class PageLifetimes:
    """Follows the stores and removals of all ranks."""

    def __init__(self) -> None:
        self._index = ResidencyIndex(0.0, _CAPACITY)
        self._ranks: dict[StreamId, _Rank] = {}
        self._num_ranks = 0

    def note(self, view: View, batch: DecodedBatch) -> None:
        """Note a batch that was applied."""
        rank = self._ranks.get(view.stream)
        if rank is None:
            rank = self._ranks[view.stream] = _Rank(self._num_ranks % _MAX_NUMBER)
            self._num_ranks += 1
        for step in batch.steps:
            if isinstance(step, (StoredPages, RemovedPages)):  # a union would be made anew each time
                if step.medium == _DEVICE and 0 in step.hashes.tobytes()[::8]:  # a tenth of the time of numpy
                    picked = step.hashes[step.hashes & _MASK == 0]
                    self._note_pages(rank, picked, batch.timestamp, isinstance(step, StoredPages))
            elif isinstance(step, AllBlocksCleared):
                self._index.sweep(rank.number)
            elif isinstance(step, SnapshotBegin):
                rank.mark, rank.is_resync = rank.mark + 1, True
            else:
                self._index.sweep(rank.number, rank.mark)
        rank.is_resync = view.marks is not None  # a resync that was cut off has no end

    def median_s(self, streams: Iterable[StreamId]) -> float | None:
        """Return the seconds for which half of the pages that ranks removed were held at most; None without any."""
        known = [self._ranks[stream].removed for stream in streams if stream in self._ranks]
        return median_lifetime(np.sum(known, axis=0)) if known else None

    def keep(self, streams: Set[StreamId]) -> Iterator[None]:
        """Forget all other ranks, in slices."""
        for stream in self._ranks.keys() - streams:
            self._index.sweep(self._ranks.pop(stream).number)
            yield

    def _note_pages(self, rank: _Rank, hashes: U64Array, time_s: float, is_store: bool) -> None:
        at = BatchTime(milliseconds(time_s), 0 if rank.is_resync else 1)
        if is_store:
            each_alone, no_parents = np.full(len(hashes), 255, np.uint8), np.zeros(len(hashes), np.uint64)
            pages = StoredPages(_DEVICE, hashes, hashes, each_alone, no_parents)
            self._index.store(rank.number, 0, pages, at, rank.mark, is_resync=True)
            return
        self._index.remove(rank.number, RemovedPages(_DEVICE, hashes, hashes), at)
        rank.removed += self._index.take_lifetimes(_DEVICE)
        if rank.removed.sum() > _MOST_COUNTED:
            rank.removed //= 2


CountedRates: TypeAlias = tuple[int, dict[StreamId, Rates]]
"""The number of intervals before a moment, at most `NUM_INTERVALS`, and the rates of each stream that had events then,
counted from a log.
"""


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
        watch._num_samples, by_stream = rates
        for stream, each in by_stream.items():
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
