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
from indexer.replay import MovingViews, Replay, Timeline
from indexer.replay.moments import parse_moment, utc_text
from indexer.replay.until import Until
from indexer.settings import IndexerSettings
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.http.fleet import Funnel
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


class Extent(NamedTuple):
    """The extent of a log when it was looked at last."""

    first_index: int
    next_index: int
    span_s: tuple[float, float] | None
    """Earliest and latest time of a record. None: the log is empty."""

    @classmethod
    def of(cls, timeline: Timeline) -> Extent:
        """Return the present extent."""
        return cls(timeline.first_index, timeline.next_index, timeline.span_s)


Key = tuple[int | None, tuple[tuple[int, int], ...] | None, float | None]


class History(NamedTuple):
    """What preceded a moment."""

    rates: CountedRates
    funnel: Funnel


class OpenMoment:
    """A moment that requests are answered from. Its views do not change while it is in use."""

    def __init__(self, key: Key, moving: MovingViews, newest: tuple[int, LogRecord] | None) -> None:
        self.key = key
        self.moving = moving
        self.newest = newest
        """The newest record of events in the log before the end of the moment, with its index."""
        self.history: History | None = None
        """None: not asked for yet."""
        self.users = 0
        """Requests that read it."""

    @property
    def views(self) -> Replay:
        """The views of the moment."""
        return self.moving.views

    @property
    def at(self) -> str:
        """How to ask for the moment."""
        return moment_text(self.moving.moment)


class OpenMoments:
    """The moments of one log. Belongs to one event loop; a thread opens and moves them, one at a time.

    A moment that nobody reads is moved forward to a later one near by, which is quicker than to open it.
    """

    def __init__(self, folder: Path, default: Until, settings: IndexerSettings | None = None) -> None:
        """default: the moment of requests that name none.

        Raises EventLogError if there is no log, OutsideTheLogError if the default is outside, or OSError.
        """
        self._timeline = Timeline(folder, settings)  # used by one thread at a time, while it holds `_working`
        self._offsets: dict[int, tuple[int, int]] | None = None  # of each partition: first, after the last
        self.extent = Extent.of(self._timeline)
        self.default = default
        if default.positions is not None:
            self._offsets = self._timeline.offsets()
        if default != Until() and (outside := self._outside(default)):
            raise OutsideTheLogError(f"{moment_text(default)} is {outside}")
        self._kept: list[OpenMoment] = []  # the most recently used one last
        self._working = asyncio.Lock()
        self._num_waiting = 0
        self._released = asyncio.Event()
        self._refreshed_at = 0.0

    async def parse(self, at: str | None, field: str = "at") -> Until:
        """Return the moment that a request names. Raises ProblemError if it is none, or outside the log."""
        try:
            moment = self.default if at is None else parse_moment(at, field).until
        except InvalidValueError as error:
            raise ProblemError.of_value(error) from None
        if moment == Until():
            return Until(offset=self.extent.next_index)
        if moment.positions is not None and self._offsets is None:
            self._offsets = await self.work(lambda timeline: timeline.offsets())
        if outside := self._outside(moment):
            raise ProblemError(422, ProblemKind.OUTSIDE_THE_LOG, f"{field}: {at} is {outside}", field, at)
        return moment

    def _outside(self, moment: Until) -> str:
        """Return why a moment is outside the log, or "" if it is inside."""
        first, end, span = self.extent
        if span is None:
            return "outside the log, which is empty"
        if moment.time_s is not None and not span[0] <= moment.time_s <= span[1]:
            return (
                f"{_side(moment.time_s < span[0])}, which has records from {utc_text(span[0])} to {utc_text(span[1])}"
            )
        if moment.offset is not None and not first < moment.offset <= end:
            return f"{_side(moment.offset <= first)}, whose moments are {first + 1} to {end}"
        for partition, offset in (moment.positions or {}).items():
            begin, stop = (self._offsets or {}).get(partition, (None, None))
            if begin is None or stop is None:
                return f"outside the log, which has no partition {partition}"
            if not begin <= offset <= stop:
                return f"{_side(offset < begin)}, which has records {partition}:{begin} to {partition}:{stop - 1}"
        return ""

    @asynccontextmanager
    async def opened(self, moment: Until) -> AsyncIterator[OpenMoment]:
        """Hold a moment open for a block. moment: of `parse`. Raises ProblemError."""
        key = _key(moment)
        found = self._find(key) or await self._opened(key, moment)
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
        before, self.extent = self.extent, await self.work(_refreshed)
        if self.extent != before:  # a time or positions may include more now
            self._kept = [each for each in self._kept if each.users or each.key[0] is not None]
            self._offsets = None

    def _find(self, key: Key) -> OpenMoment | None:
        return next((each for each in self._kept if each.key == key), None)

    async def _opened(self, key: Key, moment: Until) -> OpenMoment:
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S) as limit:
                while True:
                    async with self._turn():
                        found = self._find(key)
                        if found is None and self._has_room():
                            limit.reschedule(None)
                            found = await self._open(key, moment)
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

    async def _open(self, key: Key, moment: Until) -> OpenMoment:
        """Open a moment. The log's turn and the room are the caller's."""
        base = self._take_base(moment)
        if base is None and len(self._kept) >= _MOST_KEPT:
            self._kept.remove(next(each for each in self._kept if not each.users))  # the least recently used one

        def open_or_move() -> tuple[MovingViews, tuple[int, LogRecord] | None]:
            moving = base if base is not None and base.move(moment) else MovingViews(self._timeline, moment)
            return moving, self._timeline.event_before(moving.index)

        found = OpenMoment(key, *await self._in_thread(open_or_move))
        self._kept.append(found)
        return found

    def _take_base(self, moment: Until) -> MovingViews | None:
        """Take the latest moment that nobody reads and that can move to another one out of those in memory."""
        idle = [each for each in self._kept if not each.users and each.moving.can_move(moment)]
        if not idle:
            return None
        base = max(idle, key=lambda each: each.moving.index)
        self._kept.remove(base)
        return base.moving

    async def _in_thread(self, do: Callable[[], _T]) -> _T:
        results: list[_T] = []
        try:
            await run_in_daemon_thread(lambda: results.append(do()))
        except ProblemError:
            raise
        except (OSError, KvsightError) as error:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, f"the log cannot be read: {error}") from error
        return results[0]


def moment_text(moment: Until) -> str:
    """Return a moment in the form of the parameter `at`; "" for the end of the log."""
    if moment.offset is not None:
        return str(moment.offset)
    if moment.positions is not None:
        return ",".join(f"{partition}:{offset}" for partition, offset in moment.positions.items())
    return "" if moment.time_s is None else f"@{moment.time_s}"


def _refreshed(timeline: Timeline) -> Extent:
    timeline.refresh()
    return Extent.of(timeline)


def _key(moment: Until) -> Key:
    positions = None if moment.positions is None else tuple(sorted(moment.positions.items()))
    return moment.offset, positions, moment.time_s


def _side(is_before: bool) -> str:
    return "before the start of the log" if is_before else "behind the end of the log"
