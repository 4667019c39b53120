"""Opens moments of a log for requests, and keeps a few of them."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from api.background import run_in_daemon_thread
from api.page.worker_history import CountedRates
from api.problems import ProblemError, ProblemKind
from indexer.replay import Replay, Timeline
from indexer.settings import IndexerSettings
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.http.fleet import DecisionFunnel
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import LogRecord
from kv_events.streams import StreamId
from selection.book import Booked

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


class History(NamedTuple):
    """What preceded a moment."""

    rates: CountedRates
    funnel: DecisionFunnel
    booked: Mapping[StreamId, Booked]
    """What was reserved on each rank that had reservations."""


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

    def __init__(self, folder: Path, default: LogMoment, settings: IndexerSettings | None = None) -> None:
        """default: the moment of requests that name none.

        Raises EventLogError if there is no log, OutsideTheLogError if the default is outside, or OSError.
        """
        self._timeline = Timeline(folder, settings)  # used by one thread at a time, while it holds `_working`
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
