"""Opens moments of a log for requests, and keeps a few of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from api.daemon_threads import run_in_daemon_thread
from api.page.worker_history import CountedRates
from api.problems import ProblemError, ProblemKind
from indexer.replay import Replay, Timeline
from indexer.settings import IndexerSettings
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.http.fleet import Funnel
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import LogRecord

_MOST_KEPT: Final = 4
"""OpenMoments in memory, including those that are being opened."""
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
    funnel: Funnel


class OpenMoment:
    """A moment that requests are answered from. Its views do not change while it is in use."""

    def __init__(self, moment: LogMoment, views: Replay, newest: tuple[int, LogRecord] | None) -> None:
        self.moment = moment
        self.views = views
        self.newest = newest
        """The newest record of events in the log before the end of the moment, with its index."""
        self.history: History | None = None
        """None: not asked for yet."""
        self.users = 0
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
        self._kept: list[OpenMoment] = []  # the most recently used one last
        self._working = asyncio.Lock()
        self._num_waiting = 0
        self._released = asyncio.Event()
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
        found = self._find(moment) or await self._opened(moment)
        found.users += 1
        self._kept.remove(found)
        self._kept.append(found)
        try:
            yield found
        finally:
            found.users -= 1
            self._released.set()

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
            self._kept = [each for each in self._kept if each.users or each.moment.index is not None]

    def _find(self, moment: LogMoment) -> OpenMoment | None:
        return next((each for each in self._kept if each.moment == moment), None)

    async def _opened(self, moment: LogMoment) -> OpenMoment:
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S) as limit:
                while True:
                    async with self._turn():
                        found = self._find(moment)
                        if found is None and self._has_room():
                            limit.reschedule(None)
                            found = await self._open(moment)
                        if found is not None:
                            return found
                        self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            detail = f"{_MOST_KEPT} moments of the log are being read, and no more are kept in memory"
            raise ProblemError(503, ProblemKind.OVERLOADED, detail, retry_after_s=1) from None

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

    def _has_room(self) -> bool:
        """Return whether a moment can be opened. It may take the place of one that nobody reads."""
        return len(self._kept) < _MOST_KEPT or any(not each.users for each in self._kept)

    async def _open(self, moment: LogMoment) -> OpenMoment:
        """Open a moment. The log's turn and the room are the caller's."""
        base = self._take_base(moment)
        if base is None and len(self._kept) >= _MOST_KEPT:
            self._kept.remove(next(each for each in self._kept if not each.users))  # the least recently used one

        def open_or_move() -> tuple[Replay, tuple[int, LogRecord] | None]:
            views = self._timeline.at(moment, base)
            return views, self._timeline.event_before(views.index)

        found = OpenMoment(moment, *await self._in_thread(open_or_move))
        self._kept.append(found)
        return found

    def _take_base(self, moment: LogMoment) -> Replay | None:
        """Take the latest moment that nobody reads and that can move to another one out of those in memory."""
        idle = [each for each in self._kept if not each.users and self._timeline.can_move(each.views, moment)]
        if not idle:
            return None
        base = max(idle, key=lambda each: each.views.index)
        self._kept.remove(base)
        return base.views

    async def _in_thread(self, do: Callable[[], _T]) -> _T:
        results: list[_T] = []
        try:
            await run_in_daemon_thread(lambda: results.append(do()))
        except ProblemError:
            raise
        except (OSError, KvsightError) as error:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, f"the log cannot be read: {error}") from error
        return results[0]


def _refreshed(timeline: Timeline) -> LogExtent:
    timeline.refresh()
    return timeline.extent
