"""Reading of an event log, or of what a topic holds now: progress, extent, and damage, which ends with exit code 1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from rich.progress import Progress

from kv_events.log.event_log import EventLogCorruptedError, EventLogError
from kv_events.log.format import check_folder, list_segments
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.records import LogRecord
from kv_events.runtime.words import count, local_time
from kvsight.cli.shared.console import UsageError, at_most_one, err, progress_bar, waiting
from kvsight.cli.shared.process import interrupting_loops, run_until_interrupted

if TYPE_CHECKING:
    from indexer.replay import Replay
    from kv_events.log.reader import RecordChunk, TornTail
    from selection.book import Book

EXIT_DAMAGED = 1
"""Exit code for a log of which something cannot be used. The rest has been used."""

_MIB = 2**20
LARGE_BYTES = 64 * _MIB
"""A log of this size takes about a second to replay."""
_MOST_SHOWN = 20

LogFolder: TypeAlias = Annotated[Path, typer.Argument(help="Folder of an event log.")]


def check_new_log(folder: Path) -> None:
    """Check that a log can begin in a folder. Raises UsageError."""
    if folder.exists() and (not folder.is_dir() or list_segments(folder)):
        raise UsageError(f"{folder}: there is a log already; give a new folder")


@contextmanager
def byte_progress(what: str, num_bytes: int, shared: Progress | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, or a line of a shared one. Gives a function to call with the bytes that were read since."""
    with progress_bar() if shared is None else nullcontext(shared) as bar:
        task = bar.add_task(f"{what} (MiB)", total=num_bytes / _MIB)
        yield lambda more: bar.advance(task, more / _MIB)


@dataclass
class LogInput:
    """An event log that a command reads once, from its beginning to its end. Raises EventLogError for no log."""

    folder: Path
    damage: list[EventLogCorruptedError] = field(default_factory=list)
    tail: TornTail | None = None
    """The torn tail. None while a writer has the log open."""
    faults: list[str] = field(default_factory=list)
    """Other files that could not be used."""
    warnings: list[str] = field(default_factory=list)
    """What is unknown although nothing is damaged."""

    def __post_init__(self) -> None:
        check_folder(self.folder)
        if not list_segments(self.folder):
            raise EventLogError(f"{self.folder}: not an event log: it has no files *.kvlog")
        self.extent = LogExtent(str(self.folder))

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.path.stat().st_size for segment in list_segments(self.folder))

    def chunks(self, what: str, shared: Progress | None = None) -> Iterator[RecordChunk]:
        """Yield all sound records, as chunks. what: for the progress bar, or for its line of a shared one.

        Raises OSError.
        """
        from kv_events.log.reader import scan_log

        with byte_progress(what, self.num_bytes, shared) as show:
            for chunk in scan_log(self.folder, self.damage.append):
                chunk.note_in(self.extent)
                yield chunk
                show(chunk.end - chunk.position)
        self.find_torn_tail()

    def records(self, what: str, shared: Progress | None = None) -> Iterator[tuple[int, LogRecord]]:
        """Yield (index, record) of all sound records. See `chunks`."""
        for chunk in self.chunks(what, shared):
            yield from chunk.records()

    def views_at(self, moment: LogMoment) -> tuple[Replay, LogExtent]:
        """The views at a moment, and the extent of the log. Damage and warnings are noted.

        Ends with exit code 1 if nothing of the log can be read. Raises OSError.
        """
        from indexer.replay import Timeline

        self.write_missing_frames()
        timeline = Timeline(self.folder)
        with waiting("replaying"):
            views, extent = timeline.at(moment), timeline.extent
        extent.name = self.extent.name
        if moment.offsets is not None:
            with waiting("reading"):
                extent.offsets = timeline.offsets()
        self.damage, self.faults, self.warnings = timeline.damage, timeline.faults, timeline.warnings
        self.find_torn_tail()
        if not extent.num_records:
            self.exit_if_damaged()
        return views, extent

    def num_applied(self, views: Replay) -> int:
        """Records of this log in views of `views_at`. Views of a key frame count those before its beginning, too."""
        from indexer.replay import num_records_before

        return views.applier.records - num_records_before(self.folder, views.settings)

    def book_at(self, moment: LogMoment, views: Replay, flags: Mapping[str, Any]) -> Book | None:
        """What was reserved at a moment, None if the log knows of no reservation. views: of `views_at`. flags: BOOK.

        Raises OSError.
        """
        from indexer.replay import Timeline
        from selection.past import PastBook
        from selection.settings import SelectionSettings

        book = PastBook(self.folder, SelectionSettings.from_flags(**flags)).at(Timeline(self.folder), moment, views)
        return book if book.num_changes else None

    def views_before(self) -> Replay:
        """Return the views before the first record. Notes it if they are unknown, and why. Raises OSError."""
        from indexer.replay import open_beginning
        from indexer.settings import IndexerSettings

        beginning = open_beginning(self.folder, IndexerSettings())
        self.faults += filter(None, [beginning.fault])
        self.warnings += filter(None, [beginning.warning])
        return beginning.views

    def write_missing_frames(self) -> None:
        """Write the key frames of a large log that has none, so that any moment opens fast from now on."""
        has_frames = any(self.folder.glob("*.kvframe"))
        if self.num_bytes > LARGE_BYTES and not has_frames and os.access(self.folder, os.W_OK):
            write_key_frames(self.folder)

    def find_torn_tail(self) -> None:
        """Look for a torn tail in a log that is read by other means than `chunks`. Raises OSError."""
        from kv_events.log.reader import torn_tail

        self.tail = torn_tail(self.folder)

    def exit_if_damaged(self) -> None:
        """Print warnings and what could not be read. Ends with exit code 1 unless everything was read."""
        exit_if_any_damaged([self])

    @property
    def damage_lines(self) -> list[str]:
        """What could not be read, one line each."""
        return [*map(str, self.damage), *self.faults, *([str(self.tail)] if self.tail else [])]

    def fail_outside(self, what: str) -> NoReturn:
        """End because a range has no record, or because none can be read. Raises UsageError with the log's extent."""
        extent = self.extent
        if not extent.num_records:
            self.exit_if_damaged()
        indices = f", indices {extent.first_index} to {extent.next_index - 1}" if extent.num_records else ""
        raise UsageError(f"{what} is outside the log: {extent_text(extent)}{indices}")


def extent_text(extent: LogExtent) -> str:
    """The number and the times of the records of a log."""
    times = f", {local_time(extent.first_ms / 1000)} to {local_time(extent.last_ms / 1000)}"
    return f"{extent.name} has {count(extent.num_records, 'record')}{times if extent.num_records else ''}"


def moment_fault(extent: LogExtent, moment: LogMoment, flag: str = "--at") -> str:
    """Why a moment is outside a log; empty if it is inside."""
    if not extent.num_records:
        return f"{extent.name}: the log is empty"
    outside = extent.fault(moment, local_time)
    return outside and f"{extent.name}: {flag} {moment.typed} is {outside}"


def write_key_frames(log: Path) -> None:
    """Write the key frames and the time index of a log up to its present end. Raises EventLogError, OSError.

    Files that cannot be written are only logged: a moment opens slower without them.
    """
    from indexer.replay import LogIndexer

    indexer = LogIndexer(log)
    with progress_bar() as bar:
        task = bar.add_task("indexing", total=indexer.timeline.next_index)
        indexer.advance(lambda done: bar.update(task, completed=done))


def damage_facts(*sources: LogInput) -> dict[str, Any]:
    """What could not be read of some logs, for `--json`."""
    return {
        "damage": [
            {
                "segment": error.segment.name,
                "byte": error.position,
                "record": error.index,
                "detail": error.detail,
                "next_record": None if error.resume is None else error.resume.record_index,
            }
            for source in sources
            for error in source.damage
        ],
        "torn_tail_bytes": sum(source.tail.num_bytes for source in sources if source.tail is not None),
        "faults": [fault for source in sources for fault in source.faults],
    }


def exit_if_any_damaged(logs: Iterable[LogInput]) -> None:
    """Print the warnings of some logs and what could not be read. Ends with exit code 1 unless everything was read."""
    logs = list(logs)
    for line in dict.fromkeys(line for log in logs for line in log.warnings):
        err.print(f"warning: {line}")
    lines = list(dict.fromkeys(line for log in logs for line in log.damage_lines))  # the logs may be the same
    for line in lines[:_MOST_SHOWN]:
        err.print(f"damaged: {line}")
    if len(lines) > _MOST_SHOWN:
        err.print(f"and {len(lines) - _MOST_SHOWN} more")
    if lines:
        raise typer.Exit(EXIT_DAMAGED)


class TopicInput:
    """What a topic holds now, which a command reads once, from the oldest record to the newest."""

    damage_lines = ()

    def __init__(self, kafka: str | None, connection: dict[str, Any], moment: LogMoment) -> None:
        """connection: further settings of Kafka. moment: must not be an index. Raises KvsightError."""
        from kv_events.kafka.connection import KafkaConnection
        from kv_events.kafka.settings import KafkaSettings

        if moment.index is not None:
            raise UsageError(f"--at {moment.typed}: a topic has no index; give a time or PARTITION:OFFSET,...")
        self._settings = KafkaSettings.from_flags(kafka=kafka, **connection)
        run_until_interrupted(KafkaConnection(self._settings).check)  # before kernels are compiled
        self.extent = LogExtent(f"topic {self._settings.events_topic}")

    def records(self) -> Iterator[LogRecord]:
        """Yield all records. Raises KvsightError."""
        from indexer.sources.kafka import KafkaSource
        from indexer.sources.reader import source_records

        with progress_bar() as bar, interrupting_loops():
            task = bar.add_task("replaying", total=None)
            records = source_records(KafkaSource(self._settings), lambda total: bar.update(task, total=total))
            for index, record in enumerate(records):
                if index % 256 == 0:
                    bar.update(task, completed=index)
                self.extent.note(index, record)
                yield record

    def views_at(self, moment: LogMoment) -> tuple[Replay, LogExtent]:
        """The views at a moment, and the extent of the topic. Raises KvsightError."""
        from indexer.replay import Replay

        return Replay().apply_all(self.records(), moment), self.extent

    def num_applied(self, views: Replay) -> int:
        """Records of the topic in views of `views_at`."""
        return views.applier.records

    def book_at(self, moment: LogMoment, views: Replay, flags: Mapping[str, Any]) -> None:
        """Return None: what is reserved is in another topic."""

    def exit_if_damaged(self) -> None:
        """Do nothing: what a topic holds is not damaged."""


def open_source(
    log: Path | None, kafka: str | None, connection: dict[str, Any], moment: LogMoment
) -> LogInput | TopicInput:
    """Open the log that was asked for. connection: further settings of Kafka. Raises KvsightError."""
    if at_most_one({"LOG": log, "--kafka": kafka}) is None:
        raise UsageError("give the folder of an event log, or --kafka HOST:PORT")
    return TopicInput(kafka, connection, moment) if log is None else LogInput(log)
