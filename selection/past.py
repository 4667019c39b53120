"""The book as it was at any moment of a log."""

from contextlib import suppress
from pathlib import Path

from indexer.replay import PastRecords, Timeline
from kv_events.errors import RecordRejectedError
from kv_events.records import Channel
from kv_events.reservations import decode_reservation
from selection.book import LONGEST_S, Book, BookFullError
from selection.settings import SelectionSettings


class PastBook:
    """Rebuilds the book at one moment after another, by the clocks of the records. For one thread at a time."""

    def __init__(self, folder: Path, settings: SelectionSettings | None = None) -> None:
        """folder: of the event log. settings: default: from `KVSIGHT_*` variables."""
        self._settings = settings or SelectionSettings()
        self._records = PastRecords(folder, [Channel.RESERVATIONS], LONGEST_S)
        self._begin()

    def at(self, timeline: Timeline, index: int, now: float) -> Book:
        """Return the book of a moment, which the next call changes. See `PastRecords.advance`."""
        for record, _ in self._records.advance(timeline, index, now, self._begin):
            with suppress(RecordRejectedError, BookFullError):
                self._book.restore(decode_reservation(record.payload), record.timestamp_ms / 1000)
        self._book.settle(now)
        return self._book

    def _begin(self) -> None:
        self._book = self._settings.book()
