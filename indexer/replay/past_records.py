"""The records that precede one moment of a log after another, such as decisions: of the log and of those beside it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from indexer.replay.timeline import Timeline
from kv_events.log.format import list_segments
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.reservations import FOLDERS_BESIDE


class PastRecords:
    """Goes on at a later moment where the one before ended. For one thread at a time."""

    def __init__(self, folder: Path, channels: Sequence[Channel], span_s: float) -> None:
        """folder: of the event log. span_s: time before a moment in which records count."""
        self._folders = [folder / name for name in FOLDERS_BESIDE]  # of a service that follows an event log
        self._channels = channels
        self._span_s = span_s
        self._beside: dict[Path, Timeline] = {}
        self._read: list[int] = []  # index up to which each log has been read
        self._now = 0.0

    def advance(
        self, timeline: Timeline, index: int, now: float, begin: Callable[[], None]
    ) -> Iterator[tuple[LogRecord, bool]]:
        """Return the records that were added since the last call, each with whether it is of a log beside.

        Some may be later than the moment. index: at or after its end. now: its time. begin: called at once if earlier
        records do not count any more; then all of them are returned again. Raises OSError.
        """
        logs = [(timeline, index), *((each, each.end_of(LogMoment(time_s=now))) for each in self._open_beside())]
        starts = [log.first_after(now - self._span_s) for log, _ in logs]
        is_back, self._now = now < self._now, now
        if (
            is_back
            or len(self._read) != len(logs)
            or not all(start <= read <= stop for start, read, (_, stop) in zip(starts, self._read, logs, strict=True))
        ):
            begin()
            self._read = starts
        read, self._read = self._read, []  # begin anew if a log cannot be read
        return self._records(logs, read)

    def _records(self, logs: Sequence[tuple[Timeline, int]], read: Sequence[int]) -> Iterator[tuple[LogRecord, bool]]:
        for number, (log, stop) in enumerate(logs):
            for _, record in log.records_of(self._channels, read[number], stop):
                yield record, number > 0
        self._read = [stop for _, stop in logs]

    def _open_beside(self) -> list[Timeline]:
        for folder in self._folders:
            if folder in self._beside:
                self._beside[folder].refresh()
            elif folder.is_dir() and list_segments(folder):
                self._beside[folder] = Timeline(folder)
        return list(self._beside.values())
