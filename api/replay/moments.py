"""Opens moments of a log for requests, and keeps a few of them. Counts what preceded them."""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np

from api.background import run_in_daemon_thread
from api.decisions.window import WINDOW_S, DecisionWindow
from api.page.worker_history import INTERVAL_S, NUM_INTERVALS, CountedRates, Rates
from api.problems import ProblemError, ProblemKind
from indexer.replay import PastRecords, Replay, Timeline
from kv_events.codec import batch_or_none
from kv_events.decisions import DecisionRecord
from kv_events.errors import InvalidValueError, KvsightError, RecordRejectedError
from kv_events.http.fleet import DecisionFunnel
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import CHOICES, decode_choice, singles
from kv_events.streams import StreamId
from selection.book import Booked

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
        by_stream: dict[StreamId, Rates] = {}
        for row, number in enumerate(wanted):
            for stream, pages in self._intervals[number].items():
                rates = by_stream.setdefault(stream, np.zeros((len(wanted), 2)))
                rates[row] = np.array(pages) / INTERVAL_S
        while len(self._intervals) > _MOST_INTERVALS:
            self._intervals.popitem(last=False)
        return len(wanted), by_stream

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


_MOST_KEPT: Final = 4
"""Moments in memory, including those that are being opened."""
_MOST_WAITING: Final = 64
"""Requests that wait for a moment."""
_LONGEST_WAIT_S: Final = 30.0
"""For a place among the moments in memory."""
_REFRESH_S: Final = 1.0

_T = TypeVar("_T")


class OutsideTheLogError(KvsightError):
    """A moment is before or behind the records of a log."""


History: TypeAlias = tuple[CountedRates, DecisionFunnel, Mapping[StreamId, Booked]]
"""What preceded a moment, and what was reserved on each rank that had reservations."""


@dataclass(slots=True)
class OpenMoment:
    """A moment that requests are answered from. Its views do not change while it is in use."""

    moment: LogMoment
    views: Replay
    newest: tuple[int, LogRecord] | None
    """The newest record of events in the log before the end of the moment, with its index."""
    history: History | None = None
    """None: not asked for yet."""
    users: int = 0
    """Requests that read it."""


class OpenMoments:
    """The moments of one log. Belongs to one event loop; a thread opens and moves them, one at a time.

    A moment that nobody reads is moved forward to a later one near by, which is quicker than to open it.
    """

    def __init__(self, folder: Path, default: LogMoment) -> None:
        """default: the moment of requests that name none.

        Raises EventLogError if there is no log, OutsideTheLogError if the default is outside, or OSError.
        """
        self._timeline = Timeline(folder)  # used by one thread at a time, while it holds `_working`
        self.extent = self._timeline.extent
        self.default = default
        if default.offsets is not None:
            self.extent.offsets = self._timeline.offsets()
        if default != LogMoment() and (outside := self.extent.fault(default)):
            raise OutsideTheLogError(f"{default.text} is {outside}")
        self._kept: OrderedDict[str, OpenMoment] = OrderedDict()  # by their text, the most recently used one last
        self._places = asyncio.Semaphore(_MOST_KEPT)  # one for each moment that is read
        self._working = asyncio.Lock()
        self._num_waiting = 0
        self._refreshed_at = 0.0

    async def parse(self, at: str | None, field: str = "at") -> LogMoment:
        """Return the moment that a request names. Raises ProblemError if it is none, or outside the log."""
        try:
            moment = self.default if at is None else LogMoment.parse(at, field)
        except InvalidValueError as error:
            raise ProblemError.of_value(error) from None
        if moment == LogMoment():
            return LogMoment(index=self.extent.next_index)
        if moment.offsets is not None and not self.extent.offsets:
            self.extent.offsets = await self.work(lambda timeline: timeline.offsets())
        if outside := self.extent.fault(moment):
            raise ProblemError(422, ProblemKind.OUTSIDE_THE_LOG, f"{field}: {at} is {outside}", field, at)
        return moment

    @asynccontextmanager
    async def opened(self, moment: LogMoment) -> AsyncIterator[OpenMoment]:
        """Hold a moment open for a block. moment: of `parse`. Raises ProblemError."""
        found = self._kept.get(moment.text)
        if found is None or not found.users:
            found = await self._placed(moment)
        found.users += 1
        self._kept.move_to_end(moment.text)
        try:
            yield found
        finally:
            found.users -= 1
            if not found.users:
                self._places.release()

    async def work(self, do: Callable[[Timeline], _T]) -> _T:
        """Call `do` with the log in a thread, and return its result. Raises ProblemError if the log cannot be read."""
        async with self._turn():
            return await self._in_thread(lambda: do(self._timeline))

    async def refresh(self) -> None:
        """Take along what was appended to the log, at most once a second. Raises ProblemError."""
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_at < _REFRESH_S:
            return
        self._refreshed_at = now
        extent = await self.work(_refreshed)
        if extent != self.extent:  # a time or offsets may include more now
            self.extent = extent
            for text in [text for text, each in self._kept.items() if not each.users and each.moment.index is None]:
                del self._kept[text]

    async def _placed(self, moment: LogMoment) -> OpenMoment:
        """Return a moment that has a place among those that are read. It may have to be opened."""
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            detail = f"{_MOST_KEPT} moments of the log are being read, and no more are kept in memory"
            raise ProblemError(503, ProblemKind.OVERLOADED, detail, retry_after_s=1) from None
        found = self._kept.get(moment.text)
        try:
            if found is None:
                async with self._turn():
                    found = self._kept.get(moment.text) or await self._open(moment)
        except BaseException:
            self._places.release()
            raise
        if found.users:  # another request has opened it
            self._places.release()
        return found

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the log, which one thread uses at a time. Raises ProblemError if too many wait."""
        if self._num_waiting >= _MOST_WAITING:
            detail = f"{_MOST_WAITING} requests wait for moments of the log already"
            raise ProblemError(503, ProblemKind.OVERLOADED, detail, retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._working:
                yield
        finally:
            self._num_waiting -= 1

    async def _open(self, moment: LogMoment) -> OpenMoment:
        """Open a moment. The turn is the caller's, and a place: another moment can leave if there are too many."""
        idle = [(text, each) for text, each in self._kept.items() if not each.users]
        near = [(text, each) for text, each in idle if self._timeline.can_move(each.views, moment)]
        base = None
        if near:  # the latest moment that can move to this one
            text, base = max(near, key=lambda each: each[1].views.index)
            del self._kept[text]
        elif len(self._kept) >= _MOST_KEPT:
            del self._kept[idle[0][0]]  # the least recently used one

        def open_or_move() -> tuple[Replay, tuple[int, LogRecord] | None]:
            views = self._timeline.at(moment, None if base is None else base.views)
            return views, self._timeline.event_before(views.index)

        found = self._kept[moment.text] = OpenMoment(moment, *await self._in_thread(open_or_move))
        return found

    async def _in_thread(self, do: Callable[[], _T]) -> _T:
        try:
            return await run_in_daemon_thread(do)
        except ProblemError:
            raise
        except (OSError, KvsightError) as error:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, f"the log cannot be read: {error}") from error


def _refreshed(timeline: Timeline) -> LogExtent:
    timeline.refresh()
    return timeline.extent
