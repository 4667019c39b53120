"""The book as it was at any moment of a log."""

import math
from contextlib import suppress
from itertools import chain
from pathlib import Path

from indexer.replay import PastRecords, Replay, Timeline
from kv_events.errors import RecordRejectedError
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import ReservationRecord, decode_reservation, singles
from selection.book import LONGEST_S, Book, BookFullError
from selection.settings import SelectionSettings


class PastBook:
    """Rebuilds the book at one moment after another, by the clocks of the records. For one thread at a time."""

    def __init__(self, folder: Path, settings: SelectionSettings | None = None) -> None:
        """folder: of the event log. settings: default: those of a service without flags."""
        self._settings = settings or SelectionSettings()
        self._records = PastRecords(folder, [Channel.RESERVATIONS], LONGEST_S)
        self._ahead: list[tuple[LogRecord, bool]] = []  # read already, of later moments
        self._replica = ""
        self._begin()

    def at(self, timeline: Timeline, moment: LogMoment, views: Replay) -> Book:
        """Return the book of a moment, which the next call changes. views: those of the moment. Raises OSError."""
        index = timeline.end_of(moment) if moment.offsets is None else views.index
        now, latest = (views.now, math.inf) if moment.time_s is None else (moment.time_s, moment.time_s)
        added = self._records.advance(timeline, index, now, self._begin)
        waiting, self._ahead = self._ahead, []
        for record, is_beside in chain(waiting, added):
            if record.timestamp_ms > latest * 1000:
                self._ahead.append((record, is_beside))
                continue
            for payload in singles(record.payload):
                with suppress(RecordRejectedError, BookFullError):
                    self._restore(decode_reservation(payload), record.timestamp_ms / 1000, is_beside=is_beside)
        self._book.settle(now)
        return self._book

    def _restore(self, record: ReservationRecord, now: float, *, is_beside: bool) -> None:
        if is_beside and record.replica != self._replica:  # without Kafka, a service begins with an empty book
            self._book, self._replica = self._settings.book(), record.replica
        self._book.restore(record, now)

    def _begin(self) -> None:
        self._book, self._replica = self._settings.book(), ""
        self._ahead = []
