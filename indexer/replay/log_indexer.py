"""Keeps the key frames and the time index of an event log up to date, here or in a process of their own."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from indexer.replay.frames import FRAME_SUFFIX, checksum, save_frame, settings_of_views
from indexer.replay.timeline import Timeline
from indexer.settings import IndexerSettings
from kv_events.kernels.log_records import END, PAYLOAD
from kv_events.log.format import delete_unfinished
from kv_events.log.moments import LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.log.time_index import TIMES_SUFFIX
from kv_events.records import LogRecord
from kv_events.runtime.helper_process import helper_results
from kv_events.runtime.supervised import in_background, keep_running

logger = logging.getLogger(__name__)

_RECORD_COST = 128
"""What it takes to apply a record, in changes of pages."""
_PAGE_BYTES = 16
FRAME_COST: Final = 3_000_000
"""Changes of pages between two key frames: about a second of replay."""
_HELD_COST = 2
"""The same for each page that is held, because frames of many pages take long to write and to load."""


class LogIndexer:
    """Follows an event log and writes key frames and the time index beside it. For one thread at a time.

    There is a key frame at the first record of each file, so that the log can be opened from its beginning after older
    files are deleted. The log may be written by this process or by another one. Files that cannot be written are only
    logged and counted: a `Timeline` is slower without them, but right.
    """

    def __init__(self, folder: Path, settings: IndexerSettings | None = None, *, frame_cost: int = FRAME_COST) -> None:
        """Continues at the newest key frame. folder, settings and errors: see `Timeline`.

        frame_cost: changes of pages between two key frames of a file; a record counts as 128 of them.
        """
        self._folder = folder
        for suffix in (FRAME_SUFFIX, TIMES_SUFFIX):
            delete_unfinished(folder, suffix)
        self._frame_cost = frame_cost
        self.timeline = Timeline(folder, settings)
        """The log. Its `damage` and `faults` name what could not be used."""
        self.next_index = self._segment = 0
        """Index of the next record to read."""
        self._begin()
        self.frames_written = 0
        """Key frames written so far."""
        self.failures: dict[str, str] = {}
        """Kind of file (key frame, time index) -> why the last one of it could not be written."""

    def advance(self, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Read everything that was appended since, and write key frames that are due.

        on_progress: receives the index of the next record, now and then. Raises OSError if the log cannot be read.
        """
        self.timeline.refresh()
        if self.next_index < self.timeline.first_index:
            logger.warning(
                "%s: records from %d on were deleted before they were indexed", self._folder, self.next_index
            )
            self._begin()
        for chunk in self.timeline.chunks(self.next_index):
            while (segment := self.timeline.segment_after(self._segment)) is not None and segment <= chunk.first_index:
                self._segment = self.next_index = segment  # records before it that were not read are damaged
                self._write_frame()
            on_progress(self.next_index)
            self._apply(chunk)
        self._write("time index", self.timeline.save)

    def _begin(self) -> None:
        """Continue at the newest key frame, or at the oldest record."""
        self._views, self.next_index = self.timeline.nearest(LogMoment())
        self._segment = self.next_index  # no key frame is due for files that begin here or before
        self._cost = 0
        self._newest: tuple[LogRecord, int] | None = None  # the last record that was applied, and the index after it
        self._began_at: float | None = None  # time of the first record that was applied

    def _apply(self, chunk: RecordChunk) -> None:
        """Apply the records of a chunk from the next one on, and write the key frames that are due in it."""
        row = max(0, self.next_index - chunk.first_index)
        if self._began_at is None and row < len(chunk.rows):
            self._began_at = float(chunk.timestamps_ms[row]) / 1000
        costs = np.cumsum(_RECORD_COST + (chunk.rows[:, END] - chunk.rows[:, PAYLOAD]) // _PAGE_BYTES)
        while row < len(chunk.rows):
            spent = int(costs[row - 1]) if row else 0
            left = max(self._frame_cost, self._cost_of_held()) - self._cost
            stop = min(len(costs), int(np.searchsorted(costs, spent + left, "right")) + 1)
            self._views.apply_chunk(chunk, row, np.ones(stop - row, np.bool_))
            self._cost += int(costs[stop - 1]) - spent
            row, self.next_index = stop, chunk.first_index + stop
            self._newest = chunk.record(stop - 1), self.next_index
            if self._cost > max(self._frame_cost, self._cost_of_held()):
                self._write_frame()

    def _cost_of_held(self) -> int:
        return _HELD_COST * sum(namespace.index.num_pages for namespace in self._views.namespaces)

    def _knows_all(self) -> bool:
        """Return whether every worker was heard since the beginning, unless it is silent, and its view was live."""
        views, ttl_s = self._views, self._views.settings.worker_ttl_s
        was_heard = self._began_at is not None and views.now - self._began_at > ttl_s
        return was_heard and all(view.agreed_at for view in views.namespaces.views)

    def _write_frame(self) -> None:
        self._cost = 0
        self._views.lacks_beginning = self._views.lacks_beginning and not self._knows_all()
        record, after = self._newest or (None, -1)
        last = checksum(record) if record is not None and after == self.next_index else 0  # 0: it is damaged
        if self._write("key frame", lambda: save_frame(self._folder, self._views, self.next_index, last)):
            self.frames_written += 1

    def _write(self, kind: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except OSError as error:
            if kind not in self.failures:
                logger.warning("%s: %s; the log is complete, but slower to open", self._folder, error)
            self.failures[kind] = str(error)
            return False
        return True


@asynccontextmanager
async def indexing(folder: Path, settings: IndexerSettings | None = None) -> AsyncIterator[None]:
    """Keep the key frames and the time index of a log up to date while a block runs. A failure is only logged.

    A process of a low priority does it, because a replay in a thread would delay the block. It needs the memory of
    the views once more. If it ends, it is started again. settings: of the views; default: from `KVSIGHT_*` variables.
    """
    bounds = msgspec.json.encode(settings_of_views(settings or IndexerSettings())).decode()
    async with in_background(keep_running(lambda: _index(folder, bounds), "key frames", logger), "key frames"):
        yield


async def _index(folder: Path, settings: str) -> None:
    async for _ in helper_results("key frames", "indexer.replay", str(folder), settings):
        pass
