"""What is worth a look in a log: faults, restarts and resyncs.

`python -m analysis.markers FOLDER START` is the process.

It writes `Found` as JSON, one a line, and ends when stdin does.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from indexer.replay import Replay, Timeline
from indexer.views import View
from indexer.worker_log import WorkerChange, WorkerLog
from kv_events.codec import DecodedBatch
from kv_events.errors import KvsightError
from kv_events.http.log import Mark
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord

MARKS_COMMAND: Final = (sys.executable, "-P", "-m", "analysis.markers")

_NICENESS = 10
_REPORT_RECORDS = 2000
_LOOK_S = 5.0


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change in the life of a worker stream, in the words of `WorkerLog`."""

    index: int
    """Of the record in the log."""
    time: float
    model: str
    tenant: str
    worker: str
    dp_rank: int
    verb: str
    reason: str


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of what a search has found. The next one continues it."""

    next_index: int
    """Index of the next record to search."""
    marks: list[Mark] = []
    changes: list[Change] = []
    damage: list[str] = []
    """All that could not be used so far."""
    failure: str = ""
    """Why the search ends here."""


class _Seen(NamedTuple):
    """What is known about a stream before a batch."""

    epoch: int
    next_seq: int
    gaps: int
    restarts: int
    resyncs: int
    mismatches: int

    @classmethod
    def of(cls, view: View) -> _Seen:
        counts = view.counters
        return cls(view.epoch, view.next_seq, counts.gaps, counts.restarts, counts.resyncs, counts.digest_mismatches)


_NEW = _Seen(-1, 0, *[0] * 4)


class MarkFinder:
    """Applies records to views, and finds marks."""

    def __init__(self, views: Replay) -> None:
        self._views = views
        self._seen = {view.stream: _Seen.of(view) for view in views.namespaces.views}
        self._doubted = {view.stream for view in views.namespaces.views if view.stale_reason}
        self._where = 0, 0.0
        self._found: list[Mark] = []
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
            self._worker_log.look(self._views.namespaces.views, self._views.now)
        rejected = self._views.applier.dead_letters.counts.total()
        self._views.apply(record)
        if self._views.applier.dead_letters.counts.total() > rejected:
            key = record.key.decode(errors="replace")
            self._add("rejected", key, _worker(key), "A record cannot be applied.")

    def take(self) -> tuple[list[Mark], list[Change]]:
        """Return what was found since the last call."""
        found = self._found, self._changes
        self._found, self._changes = [], []
        return found

    def _note(self, change: WorkerChange) -> None:
        index, time = self._where
        self._changes.append(Change(index, time, *change.stream, change.verb, change.reason))

    def _compare(self, view: View, batch: DecodedBatch) -> None:
        self._worker_log.note(view)
        stream = view.stream
        before, now = self._seen.get(stream, _NEW), _Seen.of(view)
        self._seen[stream] = now
        name = stream.worker
        if now.restarts > before.restarts:
            self._add("restart", stream.key, name, f"{name} restarted.")
        if now.resyncs > before.resyncs:
            number = sum(view.num_pages)
            pages = f"{number:,} {'page' if number == 1 else 'pages'}"
            self._add("resync", stream.key, name, f"{name} has resent what it holds: {pages}.")
        if now.gaps > before.gaps and before is not _NEW:  # the log may begin after the first batches of a stream
            self._add("gap", stream.key, name, f"{name}: {_missing(before, batch)}.")
        elif now.mismatches > before.mismatches and stream not in self._doubted:
            self._add("digest", stream.key, name, f"{name}: its view differs from its cache (digest).")
        if view.stale_reason:
            self._doubted.add(stream)
        else:
            self._doubted.discard(stream)

    def _add(self, kind: str, stream: str, worker: str, text: str) -> None:
        index, time = self._where
        self._found.append(Mark(index=index, time=time, kind=kind, stream=stream, worker=worker, text=text))


def _worker(key: str) -> str:
    """Return the worker's name in the key of a record, which may be anything."""
    return (["", "", *key.split("/")])[-2]


def _missing(before: _Seen, batch: DecodedBatch) -> str:
    first = before.next_seq if batch.epoch == before.epoch else 0
    number = batch.seq - first
    if number <= 0:
        return f"batch {batch.seq} came out of order"
    return f"batch {first} is missing" if number == 1 else f"{number:,} batches are missing, {first} to {batch.seq - 1}"


def search(timeline: Timeline, start: int) -> Iterator[Found]:
    """Search a log from an index to its end. Yields what is found, now and then. Raises OSError."""
    views, index = timeline.nearest(LogMoment(index=start))
    for at, record in timeline.records(index, start):
        views.apply(record)
        index = at + 1
    finder = MarkFinder(views)
    for number, (index, record) in enumerate(timeline.records(start), 1):
        finder.apply(index, record)
        if number % _REPORT_RECORDS == 0:
            marks, changes = finder.take()
            yield Found(next_index=index + 1, marks=marks, changes=changes)
    damage = [str(error) for error in timeline.damage] + timeline.faults
    marks, changes = finder.take()
    yield Found(next_index=timeline.next_index, marks=marks, changes=changes, damage=damage)


def main() -> None:
    """Search the log that the command line names."""
    logging.disable()  # of records and workers, which the service that shows them does not log
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal of the service, which ends this process itself
    folder, start = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        for found in search(Timeline(folder), start):
            _write(found)
    except (KvsightError, OSError) as error:
        _write(Found(next_index=start, failure=str(error)))


def _write(found: Found) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
