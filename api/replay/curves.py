"""What preceded a moment: rates and changes of state of the workers, and the decisions of routers."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from api.decisions.window import WINDOW_S, DecisionWindow
from api.page.worker_history import INTERVAL_S, NUM_INTERVALS, CountedRates
from indexer.replay import Timeline
from kv_events.codec import decode_batch
from kv_events.decisions import DECISIONS_FOLDER, DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.http.fleet import DecisionFunnel
from kv_events.log.format import list_segments
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.streams import StreamId

_MOST_RECORDS: Final = 10_000
"""Records whose pages are counted for one moment, the newest ones. They take about 0.2 s."""
_MOST_INTERVALS: Final = 2000
_MOST_AHEAD: Final = 20_000
_MS: Final = 0.001


class RateHistory:
    """Counts pages by interval of the log's time. Intervals that were counted are kept. For one thread at a time."""

    def __init__(self) -> None:
        self._intervals: OrderedDict[int, dict[StreamId, tuple[int, int]]] = OrderedDict()

    def rates(self, timeline: Timeline, now: float) -> CountedRates:
        """Return the rates in the intervals before a time. Raises OSError.

        There are fewer intervals where the log begins, and where it has too many records for all of them.
        """
        end = int(now // INTERVAL_S)
        wanted = range(_first_counted(timeline, end), end)
        missing = [number for number in wanted if number not in self._intervals]
        if missing:
            self._count(timeline, missing[0], missing[-1] + 1)
        found = CountedRates(len(wanted), {})
        for row, number in enumerate(wanted):
            for stream, pages in self._intervals[number].items():
                rates = found.by_stream.setdefault(stream, np.zeros((len(wanted), 2)))
                rates[row] = np.array(pages) / INTERVAL_S
        while len(self._intervals) > _MOST_INTERVALS:
            self._intervals.popitem(last=False)
        return found

    def _count(self, timeline: Timeline, first: int, end: int) -> None:
        """Count the intervals [first, end)."""
        counted: dict[int, dict[StreamId, tuple[int, int]]] = {number: {} for number in range(first, end)}
        for _, record in timeline.records(_start_of(timeline, first), _start_after(timeline, end)):
            number = int(record.timestamp_ms / 1000 // INTERVAL_S)
            if number in counted and record.channel == Channel.EVENTS:
                _add(counted[number], record)
        self._intervals.update(counted)


def _first_counted(timeline: Timeline, end: int) -> int:
    """Return the first interval that is counted for a moment in interval `end`. It depends on the log only."""
    span_s = timeline.extent.span_s
    if span_s is None:
        return end
    first = max(end - NUM_INTERVALS, int(span_s[0] // INTERVAL_S))
    stop = _start_after(timeline, end)
    return next((each for each in range(first, end) if stop - _start_of(timeline, each) <= _MOST_RECORDS), end)


def _start_of(timeline: Timeline, interval: int) -> int:
    """Return an index with no record of the interval or a later one before it."""
    return timeline.first_after(interval * INTERVAL_S - _MS)


def _start_after(timeline: Timeline, end: int) -> int:
    """Return an index with no record of the intervals before `end` from it on."""
    return timeline.end_of(LogMoment(time_s=end * INTERVAL_S - _MS))


def _add(interval: dict[StreamId, tuple[int, int]], record: LogRecord) -> None:
    try:
        batch = decode_batch(record.payload)
    except RecordRejectedError:
        return
    stored, removed = interval.get(batch.stream, (0, 0))
    pages = batch.pages()
    interval[batch.stream] = stored + pages.stored.total(), removed + pages.removed.total()


class DecisionHistory:
    """Sums the decisions before a moment, and goes on from there at a later one. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder_beside = folder / DECISIONS_FOLDER  # of a service that follows an event log
        self._timeline_beside: Timeline | None = None
        self._window = DecisionWindow()
        self._read: list[int] = []  # index up to which each log has been read
        self._ahead: deque[DecisionRecord] = deque(maxlen=_MOST_AHEAD)  # read already, of later moments

    def funnel(self, timeline: Timeline, index: int, now: float) -> DecisionFunnel:
        """Return the funnel of a moment. index: after its newest record. now: its time. Raises OSError."""
        logs = [(timeline, timeline.first_after(now - WINDOW_S), index, math.inf)]
        if (beside := self._open_beside()) is not None:
            logs.append((beside, beside.first_after(now - WINDOW_S), beside.end_of(LogMoment(time_s=now)), now))
        if len(self._read) != len(logs) or not all(
            start <= read <= stop for read, (_, start, stop, _) in zip(self._read, logs, strict=True)
        ):
            self._window = DecisionWindow()
            self._read = [start for _, start, _, _ in logs]
            self._ahead.clear()
        read, self._read = self._read, []  # begin anew if a log cannot be read
        for _ in range(len(self._ahead)):
            self._take(self._ahead.popleft(), now)
        for number, (log, _, stop, latest) in enumerate(logs):
            for record in _decisions(log, read[number], stop):
                self._take(record, latest)
        self._read = [stop for _, _, stop, _ in logs]
        return self._window.report(now)

    def _take(self, record: DecisionRecord, latest: float) -> None:
        if record.timestamp <= latest:
            self._window.take(record)
        else:
            self._ahead.append(record)

    def _open_beside(self) -> Timeline | None:
        if self._timeline_beside is not None:
            self._timeline_beside.refresh()
        elif self._folder_beside.is_dir() and list_segments(self._folder_beside):
            self._timeline_beside = Timeline(self._folder_beside)
        return self._timeline_beside


def _decisions(timeline: Timeline, start: int, stop: int) -> Iterator[DecisionRecord]:
    for _, record in timeline.records_of(Channel.DECISIONS, start, stop):
        try:
            yield decode_decision(record.payload)
        except RecordRejectedError:
            continue
