"""What preceded a moment: rates and changes of state of the workers, and the decisions of routers."""

import math
from collections import OrderedDict, deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from api.decisions.window import WINDOW_S, DecisionWindow
from api.page.worker_history import INTERVAL_S, NUM_INTERVALS, CountedRates
from indexer.replay import PastRecords, Timeline
from kv_events.codec import batch_or_none
from kv_events.decisions import DecisionRecord
from kv_events.errors import RecordRejectedError
from kv_events.http.fleet import DecisionFunnel
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import CHOICES, decode_choice, singles
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
    batch = batch_or_none(record.payload)
    if batch is None:
        return
    stored, removed = interval.get(batch.stream, (0, 0))
    pages = batch.pages()
    interval[batch.stream] = stored + pages.stored.total(), removed + pages.removed.total()


class DecisionHistory:
    """Sums the decisions before a moment, and goes on from there at a later one. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._records = PastRecords(folder, CHOICES, WINDOW_S)
        self._begin()

    def funnel(self, timeline: Timeline, index: int, now: float) -> DecisionFunnel:
        """Return the funnel of a moment. See `PastRecords.advance`."""
        records = self._records.advance(timeline, index, now, self._begin)
        for _ in range(len(self._ahead)):
            self._take(self._ahead.popleft(), now)
        for record, is_beside in records:
            for payload in singles(record.payload):
                with suppress(RecordRejectedError):
                    choice = decode_choice(record.channel, payload)
                    if choice is not None:
                        self._take(choice, now if is_beside else math.inf)
        return self._window.report(now)

    def _begin(self) -> None:
        self._window = DecisionWindow()
        self._ahead: deque[DecisionRecord] = deque(maxlen=_MOST_AHEAD)  # read already, of later moments

    def _take(self, record: DecisionRecord, latest: float) -> None:
        if record.timestamp <= latest:
            self._window.take(record)
        else:
            self._ahead.append(record)
