"""What preceded a moment: rates and changes of state of the workers, and the decisions of routers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from api.page.funnel import WINDOW_S, FunnelWindow
from api.page.watch import INTERVAL_S, NUM_INTERVALS, Rates
from indexer.replay import Timeline
from indexer.until import Until
from kv_events.codec import RemovedPages, StoredPages, decode_batch
from kv_events.decisions import DECISIONS_FOLDER, DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.log_segment import list_segments
from kv_events.records import Channel, LogRecord
from kv_events.streams import StreamId

_MOST_RECORDS: Final = 10_000
"""Records whose pages are counted for one moment, the newest ones. They take about 0.2 s."""
_MOST_INTERVALS: Final = 2000
_MOST_DECISIONS: Final = 20_000
"""Decisions and outcomes in a funnel, the newest ones."""

Growth: TypeAlias = Mapping[StreamId, tuple[int, int]]
"""Pages stored and removed by the batches of an interval."""


class RateHistory:
    """Counts pages by interval of the log's time. Intervals that were counted are kept. For one thread at a time."""

    def __init__(self) -> None:
        self._intervals: OrderedDict[int, dict[StreamId, tuple[int, int]]] = OrderedDict()

    def rates(self, timeline: Timeline, now: float) -> dict[StreamId, Rates]:
        """Return the rates of each stream in the intervals before a time. Raises OSError.

        Rates of intervals that are too full to be counted are zero.
        """
        end = int(now // INTERVAL_S)
        wanted = range(end - NUM_INTERVALS, end)
        missing = [number for number in wanted if number not in self._intervals]
        if missing:
            self._count(timeline, missing[0], missing[-1] + 1)
        found: dict[StreamId, Rates] = {}
        for row, number in enumerate(wanted):
            for stream, pages in self._intervals.get(number, {}).items():
                found.setdefault(stream, np.zeros((NUM_INTERVALS, 2)))[row] = np.array(pages) / INTERVAL_S
        while len(self._intervals) > _MOST_INTERVALS:
            self._intervals.popitem(last=False)
        return found

    def _count(self, timeline: Timeline, first: int, end: int) -> None:
        """Count the intervals [first, end)."""
        stop = timeline.end_of(Until(time_s=end * INTERVAL_S))
        start = timeline.first_after(first * INTERVAL_S)
        counted: dict[int, dict[StreamId, tuple[int, int]]] = {number: {} for number in range(first, end)}
        is_cut = stop - start > _MOST_RECORDS
        for _, record in timeline.records(max(start, stop - _MOST_RECORDS), stop):
            number = int(record.timestamp_ms / 1000 // INTERVAL_S)
            if is_cut:  # the interval of the first record is not whole
                first, is_cut = number + 1, False
                counted = {number: {} for number in range(first, end)}
            if number in counted and record.channel == Channel.EVENTS:
                _add(counted[number], record)
        self._intervals.update(counted)


def _add(interval: dict[StreamId, tuple[int, int]], record: LogRecord) -> None:
    try:
        batch = decode_batch(record.payload)
    except RecordRejectedError:
        return
    stored, removed = interval.get(batch.stream, (0, 0))
    stored += sum(len(step.hashes) for step in batch.steps if isinstance(step, StoredPages))
    removed += sum(len(step.hashes) for step in batch.steps if isinstance(step, RemovedPages))
    interval[batch.stream] = stored, removed


class DecisionHistory:
    """Keeps the decisions that were read last. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._inside = _Decisions()
        self._folder_beside = folder / DECISIONS_FOLDER  # of a service that follows an event log
        self._beside = _Decisions()
        self._timeline_beside: Timeline | None = None

    def funnel(self, timeline: Timeline, index: int, now: float) -> FunnelWindow:
        """Return the funnel of a moment. index: after its newest record. now: its time. Raises OSError."""
        funnel = FunnelWindow()
        for record in self._inside.read(timeline, timeline.first_after(now - WINDOW_S), index):
            funnel.take(record)
        if (beside := self._open_beside()) is not None:
            stop = beside.end_of(Until(time_s=now))
            for record in self._beside.read(beside, beside.first_after(now - WINDOW_S), stop):
                if record.timestamp <= now:
                    funnel.take(record)
        return funnel

    def _open_beside(self) -> Timeline | None:
        if self._timeline_beside is not None:
            self._timeline_beside.refresh()
        elif self._folder_beside.is_dir() and list_segments(self._folder_beside):
            self._timeline_beside = Timeline(self._folder_beside)
        return self._timeline_beside


class _Decisions:
    """The newest decisions of a part of one log."""

    def __init__(self) -> None:
        self._start = self._stop = 0
        self._read: deque[tuple[int, DecisionRecord]] = deque(maxlen=_MOST_DECISIONS)

    def read(self, timeline: Timeline, start: int, stop: int) -> Iterator[DecisionRecord]:
        """Yield the decisions with indices in [start, stop), at most the newest 20,000. Raises OSError."""
        if not self._start <= start <= stop or not start <= self._stop:
            self._read.clear()
            self._start = self._stop = start
        for index, record in timeline.records_of(Channel.DECISIONS, self._stop, stop):
            try:
                self._read.append((index, decode_decision(record.payload)))
            except RecordRejectedError:
                continue
        self._stop = max(self._stop, stop)
        if len(self._read) == _MOST_DECISIONS:  # the first ones are gone
            self._start = self._read[0][0]
        return (decision for index, decision in list(self._read) if start <= index < stop)
