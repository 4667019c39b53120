"""Views that move from one moment of a log to a later one, so that not everything is replayed again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from indexer.replay.chunks import ChunkApplier
from indexer.replay.replay import Replay
from indexer.replay.timeline import Timeline
from indexer.replay.until import Until
from kv_events.records import Channel, LogRecord

_MOST_FRAMES: Final = 1
"""Key frames that are passed at most. A moment that is further away is opened from the nearest one."""
_MOST_SKIPPED: Final = 100_000
"""Records that are skipped at most, because they are later than the moment although they come before its end."""


class MovingViews:
    """The views at a moment of a log: those that `Timeline.at` returns, also after a move. For one thread at a time."""

    def __init__(self, timeline: Timeline, moment: Until) -> None:
        """Open a moment. Raises OSError."""
        self._timeline = timeline
        self._skipped: list[int] = []  # indices of records before `_next_index` that do not belong to the moment
        # of the newest record, if time has passed since then
        self._clock: tuple[float, float, float, float] | None = None
        self.moment = moment
        """Where the views are."""
        if moment.positions is not None:
            self.views = timeline.at(moment)
            self.index = timeline.index
            return
        self.views, self._next_index = timeline.nearest(moment)
        self.index = self._next_index
        """Index after the newest record of the moment."""
        self._apply(moment)

    def can_move(self, moment: Until) -> bool:
        """Return whether `move` can lead to a moment and is quicker than to open it."""
        if self.moment.positions is not None or moment.positions is not None or len(self._skipped) > _MOST_SKIPPED:
            return False
        newest = self.views.now if self._clock is None else self._clock[0]
        stop = self._timeline.end_of(moment)
        return (
            (moment.offset is None or self.index <= moment.offset)
            and (moment.time_s is None or newest <= moment.time_s)
            and self._timeline.num_frames(self.index, stop) <= _MOST_FRAMES
        )

    def move(self, moment: Until) -> bool:
        """Move to a moment for which `can_move` holds. Raises OSError.

        Returns False if the views are of no use now, because the log has records in such an order that they would not
        be those of `Timeline.at`.
        """
        freshness, had_skipped = self.views.freshness, bool(self._skipped)
        if self._clock is not None:
            self.views.now, freshness.log_read_at, freshness.resumed_at, freshness.unbroken_since = self._clock
            self._clock = None
        resumed_at, unbroken_since = freshness.resumed_at, freshness.unbroken_since
        is_in_order = self._apply(moment)
        # the end of a pause is found by the first record after it, which may be another one in the order of the log
        had_pause = (freshness.resumed_at, freshness.unbroken_since) != (resumed_at, unbroken_since)
        return is_in_order and not (had_skipped and had_pause)

    def _apply(self, moment: Until) -> bool:
        """Apply what belongs to a moment and is not applied yet. Returns False if a partition is out of order."""
        stop, applier = self._timeline.end_of(moment), ChunkApplier(self.views)
        pending, self._skipped = np.array(self._skipped, np.int64), []
        start = int(pending[0]) if len(pending) else self._next_index
        for chunk in self._timeline.chunks(start):
            first, last = max(0, start - chunk.first_index), min(len(chunk.rows), stop - chunk.first_index)
            if last <= 0:
                break
            indices = chunk.first_index + np.arange(first, last)
            is_late = np.isin(indices, pending)
            is_open = (chunk.channels[first:last] == Channel.EVENTS) & (is_late | (indices >= self._next_index))
            belongs = is_open & chunk.until(first, last, moment.time_s)
            self._skipped += indices[is_open & ~belongs].tolist()
            if not self._is_in_order(chunk.record(first + row) for row in np.flatnonzero(belongs & is_late).tolist()):
                return False
            applier.apply(chunk, first, last, belongs)
            if belongs.any():
                self.index = max(self.index, int(indices[belongs][-1]) + 1)
        self._skipped += pending[pending >= stop].tolist()
        self._next_index = max(self._next_index, stop)
        self.moment = moment
        if moment.time_s is None:
            self.index = stop
        else:
            self._pass_time(self.views, moment.time_s)
        return True

    def _is_in_order(self, late: Iterable[LogRecord]) -> bool:
        """Return whether no later record of their partitions was applied before these."""
        return all(record.offset >= self.views.positions.get(record.partition, 0) for record in late)

    def _pass_time(self, views: Replay, time_s: float) -> None:
        freshness = views.freshness
        self._clock = views.now, freshness.log_read_at, freshness.resumed_at, freshness.unbroken_since
        self._timeline.pass_time(views, time_s)
