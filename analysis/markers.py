"""What is worth a look in a log: faults, restarts and resyncs.

`python -m analysis.markers FOLDER START` is the process.

Its results are `MarkerReport`, see `kv_events.runtime.helper_process`.
"""

import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from analysis.stream_history import StreamHistory
from indexer.replay import Replay, Timeline
from indexer.slices import run_at_once
from indexer.views import View
from indexer.worker_log import WorkerChange, WorkerLog
from kv_events.codec import DecodedBatch
from kv_events.errors import KvsightError
from kv_events.http.fleet import StateChange
from kv_events.http.log import LogMarker
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.runtime.helper_process import become_helper, write_result
from kv_events.runtime.words import count
from kv_events.schema import CLOSED, counted_reason
from kv_events.streams import StreamId

_REPORT_RECORDS = 2000
_LOOK_S = 5.0


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change in the life of a worker stream, in the words of `WorkerLog`."""

    index: int
    """Of the record in the log."""
    stream: StreamId
    change: StateChange


class MarkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of what a search has found. The next one continues it."""

    next_index: int
    """Index of the next record to search."""
    marks: list[LogMarker] = []
    changes: list[Change] = []
    damage: list[str] = []
    """All that could not be used so far."""
    failure: str = ""
    """Why the search ends here."""


class MarkerFinder:
    """Applies records to views, and finds marks."""

    def __init__(self, views: Replay) -> None:
        self._views = views
        self._histories = {view.stream: StreamHistory(view) for view in views.namespaces.views}
        self._reasons = {view.stream: counted_reason(view.degraded_reason)[0] for view in views.namespaces.views}
        self._stale = {view.stream for view in views.namespaces.views if view.stale_reason}
        self._where = 0, 0.0
        self._found: list[LogMarker] = []
        self._changes: list[Change] = []
        self._worker_log = WorkerLog(views.freshness)
        self._worker_log.on_change.append(self._note)
        self._looked_at = -math.inf
        views.applier.on_applied.append(self._compare)

    def apply(self, index: int, record: LogRecord) -> None:
        """Apply a record."""
        if record.channel != Channel.EVENTS:
            return
        self._where = index, record.timestamp_ms / 1000
        if self._views.now - self._looked_at > _LOOK_S:  # for workers that are silent, or forgotten
            self._looked_at = self._views.now
            run_at_once(self._worker_log.look(self._views.namespaces.views, self._views.now))
        rejected = self._views.applier.dead_letters.counts.total()
        self._views.apply(record)
        if self._views.applier.dead_letters.counts.total() > rejected:
            key = record.key.decode(errors="replace")
            self._add("rejected", key, _worker(key), "A record cannot be applied.")

    def take(self) -> tuple[list[LogMarker], list[Change]]:
        """Return what was found since the last call."""
        found = self._found, self._changes
        self._found, self._changes = [], []
        return found

    def _note(self, change: WorkerChange) -> None:
        index, time = self._where
        if change.verb:
            event = StateChange(time=time, dp_rank=change.stream.dp_rank, event=change.verb, reason=change.reason)
            self._changes.append(Change(index, change.stream, event))

    def _compare(self, view: View, batch: DecodedBatch) -> None:
        self._worker_log.note(view)
        stream, name = view.stream, view.stream.worker
        history = self._histories.setdefault(stream, StreamHistory())
        is_known = history.seq >= 0
        change = history.note(view, batch)
        if change.is_restart:
            self._add("restart", stream.key, name, f"{name} restarted.")
        if change.is_resynced:
            pages = count(sum(view.num_pages), "page")
            self._add("resync", stream.key, name, f"{name} has resent what it holds: {pages}.")
        if change.gap is not None and is_known:  # the log may begin after the first batches of a stream
            self._add("gap", stream.key, name, f"{name}: {_missing(change.gap)}.")
        elif change.is_wrong and stream not in self._stale:
            self._add("digest", stream.key, name, f"{name}: its view differs from its cache (digest).")
        reason = counted_reason(view.degraded_reason)[0]
        if reason not in ("", CLOSED, self._reasons.get(stream)):
            self._add("degraded", stream.key, name, f"{name}: its publisher reports: {view.degraded_reason}.")
        self._reasons[stream] = reason
        if view.stale_reason:
            self._stale.add(stream)
        else:
            self._stale.discard(stream)

    def _add(self, kind: str, stream: str, worker: str, text: str) -> None:
        index, time = self._where
        self._found.append(LogMarker(index=index, time=time, kind=kind, stream=stream, worker=worker, text=text))


def _worker(key: str) -> str:
    return (["", "", *key.split("/")])[-2]


def _missing(gap: range) -> str:
    if not gap:
        return f"batch {gap.stop} came out of order"
    if len(gap) == 1:
        return f"batch {gap.start} is missing"
    return f"{len(gap):,} batches are missing, {gap.start} to {gap.stop - 1}"


def search(timeline: Timeline, start: int) -> Iterator[MarkerReport]:
    """Search a log from an index to its end. Yields what is found, now and then. Raises OSError."""
    finder = MarkerFinder(timeline.at(LogMoment(index=start)))
    for number, (index, record) in enumerate(timeline.records(start), 1):
        finder.apply(index, record)
        if number % _REPORT_RECORDS == 0:
            marks, changes = finder.take()
            yield MarkerReport(next_index=index + 1, marks=marks, changes=changes)
    damage = [str(error) for error in timeline.damage] + timeline.faults
    marks, changes = finder.take()
    yield MarkerReport(next_index=timeline.next_index, marks=marks, changes=changes, damage=damage)


def main() -> None:
    """Search the log that the command line names."""
    logging.disable()  # of records and workers, which the service that shows them does not log
    become_helper()
    folder, start = Path(sys.argv[1]), int(sys.argv[2])
    try:
        for found in search(Timeline(folder), start):
            write_result(found)
    except (KvsightError, OSError) as error:
        write_result(MarkerReport(next_index=start, failure=str(error)))


if __name__ == "__main__":
    main()
