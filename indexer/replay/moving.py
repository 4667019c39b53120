"""Views that move from one moment of a log to a later one, so that not everything is replayed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from indexer.replay.replay import Replay
from indexer.replay.timeline import Timeline
from indexer.until import Until
from kv_events.records import Channel

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
        self._clock: tuple[float, float, float] | None = None  # of the newest record, if time has passed since then
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
            self.views.now, freshness.log_read_at, freshness.resumed_at = self._clock
            self._clock = None
        resumed_at = freshness.resumed_at
        is_in_order = self._apply(moment)
        # the end of a pause is found by the first record after it, which may be another one in the order of the log
        return is_in_order and not (had_skipped and freshness.resumed_at != resumed_at)

    def _apply(self, moment: Until) -> bool:
        """Apply what belongs to a moment and is not applied yet. Returns False if a partition is out of order."""
        stop = self._timeline.end_of(moment)
        pending, self._skipped = self._skipped, []
        first = pending[0] if pending else self._next_index
        wanted, rest = set(pending), replace(moment, offset=None)
        for index, record in self._timeline.records(first, stop):
            if record.channel != Channel.EVENTS or (index < self._next_index and index not in wanted):
                continue
            if not rest.takes(record):
                self._skipped.append(index)
                continue
            if index < self._next_index and record.offset < self.views.positions.get(record.partition, 0):
                return False
            self.views.apply(record)
            self.index = max(self.index, index + 1)
        self._skipped += [index for index in pending if index >= stop]
        self._next_index = max(self._next_index, stop)
        self.moment = moment
        if moment.time_s is None:
            self.index = stop
        else:
            self._pass_time(self.views, moment.time_s)
        return True

    def _pass_time(self, views: Replay, time_s: float) -> None:
        self._clock = views.now, views.freshness.log_read_at, views.freshness.resumed_at
        self._timeline.pass_time(views, time_s)
