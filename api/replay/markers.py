"""The marks of a log, which a process of its own finds while moments are served."""

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from analysis.markers import Change, MarkerReport
from kv_events.http.fleet import StateChange
from kv_events.http.log import LogMarker
from kv_events.runtime.helper_process import HelperEndedError, helper_results
from kv_events.runtime.supervised import cancel
from kv_events.streams import StreamId

logger = logging.getLogger(__name__)

_MOST_OF_A_KIND: Final = 2000
_MOST_CHANGES: Final = 100_000
_MOST_SHOWN: Final = 30
"""Changes of a stream."""

_decoder = msgspec.json.Decoder(MarkerReport)


class MarkerSearch:
    """Searches a log from its beginning, and goes on when it has grown. Belongs to one event loop."""

    def __init__(self, folder: Path, first_index: int) -> None:
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._by_kind: dict[str, list[LogMarker]] = {}
        self._changes: dict[StreamId, list[Change]] = {}
        self._num_changes = 0
        self.next_index = first_index
        """Index up to which the log has been searched."""
        self.counts: Counter[str] = Counter()
        """Kind -> marks found."""
        self.damage: list[str] = []
        """What of the log could not be used."""
        self.failure = ""
        """Why the search has ended early, if it has."""

    @property
    def marks(self) -> list[LogMarker]:
        """The marks in the order of the log, at most 2000 of each kind."""
        return sorted((mark for marks in self._by_kind.values() for mark in marks), key=lambda mark: mark.index)

    def changes_before(self, index: int) -> dict[StreamId, list[StateChange]]:
        """Return the newest changes of each stream by the records before an index, oldest first."""
        found = {}
        for stream, changes in self._changes.items():
            stop = bisect_left(changes, index, key=lambda change: change.index)
            found[stream] = [each.change for each in changes[max(0, stop - _MOST_SHOWN) : stop]]
        return found

    def follow(self, end: int) -> None:
        """Search on up to the end of the log. Does nothing if that is being done, or has failed."""
        is_searching = self._task is not None and not self._task.done()
        if end > self.next_index and not is_searching and not self.failure:
            self._task = asyncio.create_task(self._search(), name="mark-search")

    @asynccontextmanager
    async def running(self, end: int) -> AsyncIterator[None]:
        """Search in the background of a block, and end with it. end: of the log."""
        self.follow(end)
        try:
            yield
        finally:
            await cancel(self._task)

    async def _search(self) -> None:
        arguments = str(self._folder), str(self.next_index)
        try:
            async for line in helper_results("search for marks", "analysis.markers", *arguments):
                self._take(_decoder.decode(line))
        except HelperEndedError as error:
            self.failure = self.failure or str(error)
            logger.warning("%s: %s", self._folder, error)

    def _take(self, found: MarkerReport) -> None:
        for mark in found.marks:
            self.counts[mark.kind] += 1
            kept = self._by_kind.setdefault(mark.kind, [])
            if len(kept) < _MOST_OF_A_KIND:
                kept.append(mark)
        for change in found.changes[: max(0, _MOST_CHANGES - self._num_changes)]:
            self._changes.setdefault(change.stream, []).append(change)
            self._num_changes += 1
        self.damage = found.damage or self.damage
        self.failure = found.failure
        self.next_index = max(self.next_index, found.next_index)
